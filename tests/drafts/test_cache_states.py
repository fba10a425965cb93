"""At each token the caches are plain decoding's, and go on as they do."""

from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from drafts.scripted import PROMPT, Recalling, ScriptedDrafter, decoder, text_of
from mlx_marlin.lm.drafts.drafters import Drafter, ModelDrafter
from mlx_marlin.lm.drafts.passes import Passes
from support.architectures import SIZES
from support.decoder_models import tiny
from support.profiles import sampled

COUNT = 16
pytestmark = pytest.mark.usefixtures("unfused")


class Step(NamedTuple):
    """A token of plain decoding, and what its cache says to tokens after it."""

    token: int
    following: mx.array
    types: list[str]


def following(model: nn.Module, cache: list[Any]) -> mx.array:
    """Returns logits of one more token and of three, with a copy of a cache."""
    copied = deepcopy(cache)
    rows = [model(mx.array([each]), cache=copied)[0] for each in ([3], [4, 5, 6])]
    found = mx.concatenate(rows)
    mx.eval(found)
    return found


def types(cache: list[Any]) -> list[str]:
    return [f"{type(each).__name__} {getattr(each, 'offset', '')}" for each in cache]


def plain_steps(
    model: nn.Module,
    cache: list[Any],
    quantize: Callable[[list[Any]], None] = lambda _: None,
) -> list[Step]:
    """Decodes token by token; a token is fed before it is told, as mlx-lm does."""
    model(mx.array([PROMPT[:-1]]), cache=cache)
    quantize(cache)
    token, steps = PROMPT[-1], []
    for nth in range(COUNT + 1):
        logits = model(mx.array([[token]]), cache=cache)
        quantize(cache)
        if nth:
            steps.append(Step(token, following(model, cache), types(cache)))
        token = int(mx.argmax(logits[0, -1]).item())
    return steps


def assert_state(model: nn.Module, cache: list[Any], step: Step) -> None:
    assert types(cache) == step.types
    found = following(model, cache)
    assert mx.allclose(found, step.following, rtol=1e-3, atol=1e-3).item()


def assert_states(
    model: nn.Module,
    steps: list[Step],
    cache: list[Any],
    passes: Passes | None = None,
) -> ScriptedDrafter:
    """Decodes with drafts that are wrong at each position, and compares each state."""
    text = [*PROMPT, *(step.token for step in steps)]
    drafter = ScriptedDrafter(text, 4, lambda nth: (nth + 2) % 5)
    decoding = decoder(model, drafter, cache=cache, passes=passes)
    for token, step in zip(decoding.tokens(PROMPT, COUNT), steps, strict=True):
        assert token.token == step.token
        assert_state(model, cache, step)
    assert_state(model, cache, steps[-1])
    return drafter


@lru_cache
def chunked() -> nn.Module:
    """Returns a model whose attention forgets at the borders of chunks."""
    module = import_module("mlx_lm.models.llama4")
    own = {"attention_chunk_size": 6, "interleave_moe_layer_step": 2}
    routed = {"num_local_experts": 2, "num_experts_per_tok": 1, "use_qk_norm": True}
    given = SIZES | own | routed | {"intermediate_size_mlp": 64}
    given |= {"num_hidden_layers": 4, "model_type": "llama4"}
    return seeded(module.Model(module.ModelArgs(given, "llama4")))


@lru_cache
def mixed() -> nn.Module:
    """Returns a model with windows and recurrent states in lists of caches."""
    module = import_module("mlx_lm.models.baichuan_m1")
    own = {"sliding_window_layers": [1], "conv_window": 2}
    return seeded(module.Model(module.ModelArgs.from_dict(SIZES | own)))


def seeded(model: nn.Module) -> nn.Module:
    mx.random.seed(5)
    for path, array in nn.utils.tree_flatten(model.parameters()):
        spread = 0.3 * mx.random.normal(array.shape)
        model.load_weights([(path, array + spread)], strict=False)
    mx.eval(model.parameters())
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    name: partial(lambda name: text_of(name).model, name)
    for name in ("llama", "gpt_oss", "mamba2", "qwen3_next")
} | {"llama4": chunked, "baichuan_m1": mixed}


@lru_cache
def steps_of(name: str) -> list[Step]:
    model = MODELS[name]()
    return plain_steps(model, make_prompt_cache(model))


@sampled(2, 6)
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_is_plain_decodings_at_each_token(name: str) -> None:
    model = MODELS[name]()

    drafter = assert_states(model, steps_of(name), make_prompt_cache(model))

    assert len({accepted for _, accepted in drafter.lengths}) > 2


SIZES_OF_WINDOWS = range(1, len(PROMPT) + COUNT + 2)


@sampled(1, 3)
@pytest.mark.parametrize(("keep", "by_model"), [(0, False), (4, False), (0, True)])
def test_windows_of_every_size_show_the_tokens_that_they_do_without_drafts(
    keep: int, by_model: bool
) -> None:
    """The window of the model, or of a draft model that drafts what has no window.

    It is full before, in and after the prompt, and in each row of a pass.
    """
    model = Recalling()
    accepted = 0
    for size in SIZES_OF_WINDOWS[:: 2 if by_model else 1]:

        def windows(size: int = size) -> list[Any]:
            return [RotatingKVCache(size, min(keep, size - 1))]

        if by_model:
            cache, own = [KVCache()], windows()
            steps = plain_steps(model, [KVCache()])
            expected = plain_cache_states(model, steps, windows())
            drafter: Drafter = ModelDrafter(Passes(model, own))
        else:
            cache = own = windows()
            expected = steps = plain_steps(model, windows())
            text = [*PROMPT, *(step.token for step in steps)]
            length = (1, 3, 7)[size % 3]
            drafter = ScriptedDrafter(
                text, length, lambda nth, count=length + 1: (nth + 2) % count
            )
        decoding = decoder(model, drafter, cache=cache)
        tokens = decoding.tokens(PROMPT, COUNT)
        for token, step, state in zip(tokens, steps, expected, strict=True):
            assert token.token == step.token
            assert types(own) == state.types
            assert mx.array_equal(following(model, own), state.following)
        accepted += decoding.accepted
    assert accepted > 50


@pytest.mark.parametrize("offset", range(12))
def test_a_pass_has_room_for_rows_that_are_as_if_each_were_alone(offset: int) -> None:
    keeping, sliding, plain = RotatingKVCache(10, 4), RotatingKVCache(10), KVCache()
    for each in (keeping, sliding, plain):
        each.offset = offset
    before_full = {m for m in range(1, 6) if offset + m < 10}
    exact = {m for m in range(1, 6) if offset + m <= 8 or offset >= 8}

    def rooms(caches: list[Any], quantized_from: int | None = None) -> list[int]:
        passes = Passes(nn.Module(), caches, quantized_from=quantized_from)
        return [passes.room(rows) for rows in range(1, 6)]

    def most(allowed: set[int]) -> list[int]:
        return [max({0, *range(1, m + 1)} & {0, *allowed}) for m in range(1, 6)]

    assert rooms([keeping]) == most(before_full)
    assert rooms([plain, sliding]) == [1, 2, 3, 4, 5]
    assert rooms([plain], 8) == rooms([sliding, CacheList(plain)], 8) == most(exact)
    assert rooms([CacheList(plain, keeping)], 8) == most(exact & before_full)


@pytest.mark.parametrize("kept", range(5, 9))
@pytest.mark.parametrize(("size", "keep"), [(2, 0), (3, 0), (7, 4), (7, 5), (8, 0)])
def test_rows_that_overwrote_a_window_are_taken_back_unless_they_overwrote_each_other(
    size: int, keep: int, kept: int
) -> None:
    model, cache = Recalling(), [RotatingKVCache(size, keep)]
    passes = Passes(model, cache)
    passes.feed(PROMPT[:5])
    passes.begin(3, passes=3)
    for token in PROMPT[5:8]:
        passes.run(mx.array([token]))
    passes.keep(kept)
    assert passes.fed == (kept if size - keep >= 3 or kept == 8 else 5)
    passes.feed(PROMPT[passes.fed : kept])
    expected = [RotatingKVCache(size, keep)]
    for token in PROMPT[:kept]:
        model(mx.array([[token]]), cache=expected)
    assert mx.array_equal(following(model, cache), following(model, expected))


def test_a_prompt_is_evaluated_and_memory_freed_before_a_part_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[Any] = []
    passes = Passes(Recalling(), [KVCache()], step=4)
    monkeypatch.setattr(mx, "eval", lambda states: events.append(passes.fed))
    monkeypatch.setattr(mx, "clear_cache", lambda: events.append("freed"))
    passes.feed(PROMPT[:10], lambda count: events.append(f"told {count}"))
    assert events == [
        *(4, "freed", "told 4", 8, "freed", "told 8", 10, "freed", "told 10")
    ]


@sampled(3, 10)
@pytest.mark.parametrize("start", [0, *range(len(PROMPT) - 2, len(PROMPT) + 8)])
def test_a_cache_is_quantized_when_plain_decodings_is(start: int) -> None:
    """Whatever a pass with that token is accepted of."""
    model = tiny("qwen3")
    quantize = partial(
        maybe_quantize_kv_cache, quantized_kv_start=start, kv_group_size=32, kv_bits=4
    )
    steps = plain_steps(model, make_prompt_cache(model), quantize)
    assert "QuantizedKVCache" in steps[-1].types[0]
    cache = make_prompt_cache(model)
    passes = Passes(model, cache, quantize, quantized_from=start)

    assert_states(model, steps, cache, passes)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mamba2"])
def test_a_draft_models_cache_has_the_text_at_each_token(name: str) -> None:
    model = MODELS[name]()
    cache, own = make_prompt_cache(model), make_prompt_cache(model)
    drafter = ModelDrafter(Passes(model, own))
    decoding = decoder(model, drafter, cache=cache)
    for token, step in zip(decoding.tokens(PROMPT, COUNT), steps_of(name), strict=True):
        assert token.token == step.token
        assert_state(model, cache, step)
        assert_state(model, own, step)
    assert decoding.accepted > COUNT // 2


def test_a_wrong_draft_models_cache_has_the_text_at_each_token() -> None:
    model, other = MODELS["llama"](), tiny("qwen3")
    steps = steps_of("llama")
    expected = plain_cache_states(other, steps, make_prompt_cache(other))
    own = make_prompt_cache(other)
    # Soon no draft pays, so that a rejected one is followed by none.
    seconds = {1: 1.0, 2: 1.5, 16: 1.6}
    decoding = decoder(model, ModelDrafter(Passes(other, own)), seconds=seconds)
    for token, step, state in zip(
        decoding.tokens(PROMPT, COUNT), steps, expected, strict=True
    ):
        assert token.token == step.token
        assert_state(other, own, state)
    assert decoding.drafted
    assert token.rows == 1


def plain_cache_states(
    model: nn.Module, steps: list[Step], cache: list[Any]
) -> list[Step]:
    """Returns the states of another model's cache that is fed the same text."""
    found = []
    model(mx.array([PROMPT]), cache=cache)
    for step in steps:
        model(mx.array([[step.token]]), cache=cache)
        found.append(Step(step.token, following(model, cache), types(cache)))
    return found


def test_what_is_shown_leaves_no_trace() -> None:
    """Whatever its graph is: the model reads other tokens for it."""
    model = MODELS["qwen3_next"]()
    cache = make_prompt_cache(model)
    passes = Passes(model, cache)
    passes.feed(PROMPT)
    passes.run(mx.array([1, 2, 3, 4]))
    expected = following(model, cache)
    passes._model = lambda tokens, cache: model(tokens + 9, cache=cache)  # type: ignore

    passes.show([*PROMPT, 1, 2])
    assert not mx.allclose(following(model, cache), expected)
    passes.resume()

    assert mx.array_equal(following(model, cache), expected)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next"])
def test_a_cache_that_is_saved_at_a_drafted_token_goes_on(
    name: str, tmp_path: Path
) -> None:
    model, steps = MODELS[name](), steps_of(name)
    text = [*PROMPT, *(step.token for step in steps)]
    cache = make_prompt_cache(model)
    decoding = decoder(model, ScriptedDrafter(text, 4, lambda nth: 4), cache=cache)
    tokens = decoding.tokens(PROMPT, COUNT)
    nth = next(nth for nth, token in enumerate(tokens) if token.from_draft)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, cache)

    assert_state(model, load_prompt_cache(file), steps[nth])
    assert next(tokens).token == steps[nth + 1].token
