"""`stream_generate`: mlx-lm's function of this name, with drafts that pay."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    DEFAULT_QUANTIZED_KV_START,
    GenerationResponse,
    generation_stream,
    maybe_quantize_kv_cache,
    wired_limit,
)
from mlx_lm.generate import stream_generate as without_drafts
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_marlin.lm.drafts.decoder import Decoder, Picker, Processor, Sampler, Token
from mlx_marlin.lm.drafts.drafters import (
    Drafter,
    HeadDrafter,
    LookupDrafter,
    ModelDrafter,
)
from mlx_marlin.lm.drafts.heads import DraftHead, Trunk
from mlx_marlin.lm.drafts.hidden_rows import HiddenPasses
from mlx_marlin.lm.drafts.pass_cost import PassCost, cost_of
from mlx_marlin.lm.drafts.passes import Passes
from mlx_marlin.lm.race.conditions import is_divided

IGNORED = ("num_draft_tokens", "input_embeddings")
"""Arguments of mlx-lm's function that the length that pays replaces, or that are not
for this loop."""


@dataclass
class DraftedResponse(GenerationResponse):
    """mlx-lm's response, and what drafts did."""

    drafted: int = 0  # Tokens drafted so far
    accepted: int = 0  # Drafted tokens accepted so far
    rows: int = 1  # Rows of the pass that this token is from
    plain_tps: float = 0.0  # Tokens a second that plain decoding would have had
    # What was known of the seconds of passes before they were timed: "measured",
    # "predicted", or "assumed"
    cost: str = "assumed"
    passes: int = 1  # Passes whose tokens were yielded so far
    # Drafted tokens accepted so far, by what drafted them: "heads", "lookup", "model"
    accepted_by: dict[str, int] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """What drafts did, in one line."""
        by = ", ".join(f"{name} {n}" for name, n in sorted(self.accepted_by.items()))
        return (
            f"drafts: {self.accepted} of {self.drafted} accepted, "
            f"{self.generation_tokens / self.passes:.1f} tokens a pass"
            f"{', by ' if by else ''}{by}"
        )


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    stream: Any = None,
    *,
    lookup: bool = False,
    **options: Any,
) -> Generator[GenerationResponse, None, None]:
    """Generates text as `mlx_lm.stream_generate` does, and drafts tokens where it pays.

    Greedy text is that of plain decoding, up to ties of the model's logits: products of
    several rows are rounded otherwise, unless the model is `invariant`. A sampler and
    processors are called once for each token, as without drafts: the text is that of
    plain decoding with the same seed, and they may have a state.

    Args:
        model: An mlx-lm model; after `optimize` on a GPU, the cost of its passes is
            measured.
        tokenizer: Its tokenizer.
        prompt: The text, or its tokens.
        max_tokens: Most tokens to generate; -1 for no limit.
        draft_model: A smaller model with the same tokenizer, which drafts, or what
            `load_heads` returned for the model; with `lookup`, each pass verifies the
            draft that is expected to gain more.
        stream: MLX's stream or device. Default: mlx-lm's.
        lookup: Draft what followed the last few tokens earlier in the text.
        **options: The options of `mlx_lm.stream_generate`: `sampler`,
            `logits_processors`, `prompt_cache`, `max_kv_size`, `prefill_step_size`,
            `kv_bits`, `kv_group_size`, `quantized_kv_start` and
            `prompt_progress_callback`. `num_draft_tokens` has no effect: the length
            follows from the cost of a pass and from how many tokens were accepted.
            `prompt_cache` has what was yielded and nothing else at each response. With
            `input_embeddings`, and for a model that is divided among machines, nothing
            is drafted.

    Yields:
        `DraftedResponse`; without drafts, and with embeddings, mlx-lm's.

    Raises:
        ValueError: If `max_tokens` is 0, the prompt is empty, or `draft_model` is the
            head of another model.
        TypeError: If an option is not one of mlx-lm's.
    """
    stream = generation_stream if stream is None else stream
    drafts = lookup or draft_model is not None
    # Machines that share a model would draft by their own clocks, and then wait.
    plain = options.get("input_embeddings") is not None or is_divided(model)
    if plain or not drafts:
        yield from without_drafts(
            model, tokenizer, prompt, max_tokens, None, stream, **options
        )
        return
    if max_tokens == 0:
        raise ValueError("max_tokens=0, expected a positive number, or -1 for no limit")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    tokens = _tokens(tokenizer, prompt)
    cost = cost_of(model)
    given = {name: each for name, each in options.items() if name not in IGNORED}
    decoding = _Decoding(
        model, draft_model, cost, stream, is_looking_up=lookup, **given
    )
    yield from _responses(decoding, tokenizer, tokens, max_tokens)


class _Decoding:
    """A decoder with the options of mlx-lm."""

    def __init__(
        self,
        model: nn.Module,
        draft_model: nn.Module | None,
        cost: PassCost,
        stream: Any,
        *,
        is_looking_up: bool,
        sampler: Sampler | None = None,
        logits_processors: Sequence[Processor] | None = None,
        max_kv_size: int | None = None,
        prompt_cache: list[Any] | None = None,
        prefill_step_size: int = 2048,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
        prompt_progress_callback: Callable[[int, int], None] | None = None,
    ) -> None:
        own, others = _split(prompt_cache, model, draft_model, max_kv_size)
        quantize_caches = partial(
            maybe_quantize_kv_cache,
            quantized_kv_start=quantized_kv_start,
            kv_group_size=kv_group_size,
            kv_bits=kv_bits,
        )

        def quantize(cache: list[Any]) -> None:
            quantize_caches(cache)
            if prompt_cache is not None and draft_model is not None:
                prompt_cache[:] = own + others  # quantizing replaces caches in a list

        how: dict[str, Any] = {
            "quantize": quantize,
            "step": prefill_step_size,
            "quantized_from": None if kv_bits is None else quantized_kv_start,
            "is_seen": prompt_cache is not None,
        }
        passes, computing = _drafting(model, own, draft_model, others, how)
        if draft_model is not None:
            of_drafts = cost_of(draft_model)
            if of_drafts.source == "measured":
                computing[0].seconds_of_token = of_drafts.seconds(1)
        drafters: list[Drafter] = [LookupDrafter()] if is_looking_up else []
        picker = Picker(sampler=sampler, processors=logits_processors or ())
        self.model, self.cost, self.stream = model, cost, stream
        self.progress = prompt_progress_callback or (lambda *_: None)
        self.decoder = Decoder(passes, drafters + computing, cost, picker, stream)


def _drafting(
    model: nn.Module,
    own: list[Any],
    draft_model: nn.Module | None,
    others: list[Any],
    how: dict[str, Any],
) -> tuple[Passes, list[Drafter]]:
    """Returns a model's passes, and what computes drafts for them."""
    if draft_model is None:
        return Passes(model, own, **how), []
    if not isinstance(draft_model, DraftHead):
        drafter = ModelDrafter(Passes(draft_model, others, **how))
        return Passes(model, own, **how), [drafter]
    if draft_model.trunk.text is not Trunk(model).text:
        raise ValueError(
            "draft_model is the head of another model, expected what load_heads "
            "returned for this one"
        )
    before = draft_model.family.before_norm
    passes = HiddenPasses(draft_model.trunk.norm, before, model, own, **how)
    of_head = HiddenPasses(draft_model.norm, before, draft_model, others, **how)
    return passes, [HeadDrafter(of_head, passes)]


def _split(
    prompt_cache: list[Any] | None,
    model: nn.Module,
    draft_model: nn.Module | None,
    max_kv_size: int | None,
) -> tuple[list[Any], list[Any]]:
    """Returns the caches of the model and of the draft model.

    mlx-lm's callers give both in one list, the model's first.
    """
    own = make_prompt_cache(model, max_kv_size)
    others = [] if draft_model is None else make_prompt_cache(draft_model)
    if prompt_cache is None:
        return own, others
    if draft_model is None:
        return prompt_cache, []
    return prompt_cache[: len(own)], prompt_cache[len(own) :] or others


def _tokens(tokenizer: Any, prompt: str | mx.array | list[int]) -> list[int]:
    """Returns the tokens of a prompt, with special ones unless it begins with them."""
    if isinstance(prompt, str):
        begun = tokenizer.bos_token is not None and prompt.startswith(
            tokenizer.bos_token
        )
        prompt = tokenizer.encode(prompt, add_special_tokens=not begun)
    given: Any = prompt.tolist() if isinstance(prompt, mx.array) else prompt
    tokens: list[int] = [*given]
    if not tokens:
        raise ValueError("prompt has no tokens, expected at least one")
    return tokens


def _responses(
    decoding: _Decoding, tokenizer: Any, prompt: list[int], most: int
) -> Generator[GenerationResponse, None, None]:
    detokenizer = tokenizer.detokenizer
    started = time.perf_counter()
    prompt_seconds = 0.0
    decoding.progress(0, len(prompt))

    def told(count: int) -> None:
        decoding.progress(count, len(prompt))

    def response(token: Token, number: int, reason: str | None) -> DraftedResponse:
        decoder = decoding.decoder
        return DraftedResponse(
            text=detokenizer.last_segment,
            token=token.token,
            logprobs=token.logprobs,
            from_draft=token.from_draft,
            prompt_tokens=len(prompt),
            prompt_tps=len(prompt) / prompt_seconds,
            generation_tokens=number,
            generation_tps=number / (time.perf_counter() - started),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=reason,
            drafted=decoder.drafted,
            accepted=decoder.accepted,
            rows=token.rows,
            plain_tps=1 / decoding.cost.seconds(1),
            cost=decoding.cost.source,
            passes=decoder.passes,
            accepted_by=dict(decoder.accepted_by),
        )

    with (
        wired_limit(decoding.model, [decoding.stream]),
        closing(decoding.decoder.tokens(prompt, most, told)) as tokens,
    ):
        for number, token in enumerate(tokens, 1):
            if number == 1:
                now = time.perf_counter()
                prompt_seconds, started = now - started, now
                decoding.progress(len(prompt), len(prompt))
            is_end = token.token in tokenizer.eos_token_ids
            if not is_end:
                detokenizer.add_token(token.token)
            if is_end or number == most:
                detokenizer.finalize()
                yield response(token, number, "stop" if is_end else "length")
                break
            yield response(token, number, None)
