"""Heads that ship with models draft what their weights say, and change no text."""

from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_marlin
from drafts import scripted
from drafts.scripted import PROMPT, assert_same_text, plain
from drafts.test_broken_off import Failing
from drafts.test_stream import TEXT, _fixed, loaded
from mlx_marlin import load_heads
from mlx_marlin.lm.drafts import drafters, stream
from mlx_marlin.lm.drafts.decoder import Decoder
from mlx_marlin.lm.drafts.drafters import HeadDrafter
from mlx_marlin.lm.drafts.heads import DraftHead, Trunk
from mlx_marlin.lm.drafts.hidden_rows import HiddenPasses
from mlx_marlin.lm.drafts.stream import DraftedResponse
from support import head_models
from support.float64_llama import layer, normed
from support.head_models import CONFIGS, craft
from support.profiles import sampled

__all__ = ["_fixed", "loaded"]
COUNT = 12


def decoder(
    model: nn.Module, head: DraftHead, cache: list[Any] | None = None, step: int = 2048
) -> tuple[Decoder, list[Any]]:
    """Returns a decoder that drafts with a head, and the head's cache."""
    before, own = head.family.before_norm, head.make_cache()
    cache = make_prompt_cache(model) if cache is None else cache
    main = HiddenPasses(head.trunk.norm, before, model, cache, step=step)
    drafter = HeadDrafter(HiddenPasses(head.norm, before, head, own), main)
    return scripted.decoder(model, drafter, passes=main), own


def states(model: nn.Module, head: DraftHead, text: list[int]) -> mx.array:
    """Returns the hidden states of a text, as the family's heads get them."""
    own: Any = Trunk(model)
    norm, tokens = own.norm, mx.array([text])
    if head.family.before_norm:
        own.inner[own.norm_name] = nn.Identity()
    found: mx.array = own.inner(tokens)
    own.inner[own.norm_name] = norm
    return found


def assert_pairs(
    model: nn.Module, head: DraftHead, cache: list[Any], text: list[int]
) -> None:
    """Checks that a head's cache goes on as one that was fed the pairs of a text."""
    expected, hidden = head.make_cache(), states(model, head, text)
    head(mx.array([text[1:]]), hidden[:, :-1], expected)
    following = mx.array([[3]]), hidden[:, -1:]
    after = [head(*following, each) for each in (cache, expected)]
    assert mx.allclose(*after, rtol=1e-4, atol=1e-4)


@sampled(5)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.usefixtures("unfused")
def test_a_head_leaves_the_text_and_has_the_pairs_of_it_and_no_others(
    family: str, tmp_path: Path
) -> None:
    model, head = head_models.load(tmp_path, family)
    text, logprobs = plain(model, PROMPT, COUNT)
    decoding, cache = decoder(model, head)

    found = [each.token for each in decoding.tokens(PROMPT, COUNT)]

    assert_same_text(found, text, logprobs)
    assert decoding.drafted > decoding.accepted
    assert_pairs(model, head, cache, [*PROMPT, *found])


@sampled(5)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_head_that_knows_the_next_token_is_always_right(
    family: str, tmp_path: Path
) -> None:
    """By the embedding of the last token, or by the model's state of the one before.

    A W whose halves are swapped repeats tokens. So order, alignment and what the head
    goes on with are as the family's.
    """
    model, head = head_models.load(tmp_path, family)
    prompt = [*range(40, 52)]
    text = [each % 64 for each in range(52, 52 + COUNT)]
    for by in ("embedding", "hidden"):
        craft(model, head, by=by)
        decoding, _ = decoder(model, head)
        assert [each.token for each in decoding.tokens(prompt, COUNT)] == text
        assert decoding.accepted == decoding.drafted > 6
    craft(model, head, by="embedding", swapped=True)
    decoding, _ = decoder(model, head)
    assert [each.token for each in decoding.tokens(prompt, COUNT)] == text
    assert decoding.accepted == 0 < decoding.drafted


@pytest.mark.parametrize("stop", [1, 2, 3, 7])
@pytest.mark.parametrize("family", ["qwen3_next", "mimo_v2_flash"])
def test_a_heads_cache_has_what_was_yielded_when_decoding_is_closed(
    family: str, stop: int, tmp_path: Path
) -> None:
    model, head = head_models.load(tmp_path, family)
    if stop > 2:
        craft(model, head, by="hidden")
    decoding, cache = decoder(model, head)
    tokens = decoding.tokens([*range(40, 52)], COUNT)
    found = [next(tokens).token for _ in range(stop)]
    tokens.close()
    assert_pairs(model, head, cache, [*range(40, 52), *found])


@pytest.mark.parametrize("turn", [2, 3, 4])
@pytest.mark.parametrize("family", ["mimo", "mimo_v2_flash"])
def test_a_heads_cache_has_what_was_yielded_after_an_error(
    family: str, turn: int, tmp_path: Path
) -> None:
    """Of the pass that verifies a draft: the head has the token before it already."""
    model, head = head_models.load(tmp_path, family)
    decoding, cache = decoder(model, head)
    drafter: Any = decoding._drafters[0]
    drafter._model._model = Failing(model, turn)
    drafter.probabilities = lambda _: [0.9] * (turn - 1)
    found: list[int] = []
    with pytest.raises(RuntimeError, match="as asked"):
        found.extend(each.token for each in decoding.tokens(PROMPT, COUNT))
    assert_pairs(model, head, cache, [*PROMPT, *found])


def test_a_pass_keeps_the_states_of_its_own_thread(tmp_path: Path) -> None:
    model, head = head_models.load(tmp_path, "mimo")
    norm, caches, x = head.trunk.norm, [make_prompt_cache(model) for _ in "ab"], PROMPT
    passes, other = (HiddenPasses(norm, False, model, cache) for cache in caches)
    others = Thread(target=lambda: (norm(mx.zeros((1, 9, 64))), other.run(mx.array(x))))

    def beside(tokens: mx.array, cache: list[Any]) -> mx.array:
        found: mx.array = model(tokens, cache=cache)
        others.start()
        others.join(0.05)  # it waits for this pass
        return found

    passes._model = beside  # type: ignore[assignment]
    passes.run(mx.array(x))
    others.join()
    assert mx.allclose(passes.rows.take(0, 11), states(model, head, x)[0], atol=1e-5)
    assert (type(norm), other.rows.end) == (nn.RMSNorm, len(x))


@pytest.mark.parametrize("pays", [False, True])
def test_a_prompt_is_fed_in_parts_and_no_rows_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    monkeypatch.setattr(drafters, "PENDING", 4)
    model, head = head_models.load(tmp_path, "mimo")
    prompt = [7 * each % 64 for each in range(23)]
    text, _ = plain(model, prompt, COUNT)
    decoding, cache = decoder(model, head, step=5)
    drafter: Any = decoding._drafters[0]
    fed: list[int] = []
    run = HiddenPasses.run

    def watched(passes: HiddenPasses, tokens: mx.array, *given: Any, **o: Any) -> Any:
        if passes is drafter._head:
            fed.append(tokens.size)
        waiting = sum(len(rows) for _, rows in drafter._model.rows._parts)
        assert waiting <= 4 + 5 or pays  # rejected ones stay for a pass
        return run(passes, tokens, *given, **o)

    monkeypatch.setattr(HiddenPasses, "run", watched)
    monkeypatch.setattr(drafter, "probabilities", lambda m: [0.99] * m * pays)

    found = [each.token for each in decoding.tokens(prompt, COUNT)]

    assert found == text
    assert fed[:4] == [4, 5, 5, 5]
    assert (decoding.drafted > 0) == pays
    assert pays or sum(fed) == len(prompt) + COUNT - 1
    assert_pairs(model, head, cache, [*prompt, *found])


def drawn(logprobs: mx.array) -> mx.array:
    return mx.random.categorical(logprobs * 3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lookup": True},
        {"sampler": drawn, "lookup": True},
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 20},
        {"max_kv_size": 400},
        {"logits_processors": [lambda tokens, x: x.at[:, tokens].add(-2.0)]},
    ],
    ids=lambda options: ", ".join(options) or "alone",
)
@pytest.mark.usefixtures("unfused", "_fixed")
def test_stream_generate_with_a_head_has_the_text_of_mlx_lm(
    options: dict[str, Any], loaded: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    tokenizer = loaded[1]
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1}  # of 32 columns
    sizes["vocab_size"] = len(tokenizer.vocab)
    model, head = head_models.load(tmp_path, "mimo", **sizes)
    own = {name: each for name, each in options.items() if name != "lookup"}
    texts, last = [], None
    for generate, given in (
        (mlx_lm.stream_generate, own),
        (mlx_marlin.stream_generate, {**options, "draft_model": head}),
    ):
        cache = make_prompt_cache(model, options.get("max_kv_size"))
        for prompt in (TEXT, "So"):  # the second goes on with the caches
            if given is not own and prompt == "So":
                assert len(cache) in (2, 3)
            mx.random.seed(3)
            responses = [
                *generate(model, tokenizer, prompt, 14, prompt_cache=cache, **given)
            ]
            last = responses[-1]
            texts.append([each.token for each in responses])
    assert texts[:2] == texts[2:]
    assert isinstance(last, DraftedResponse)
    assert last.drafted > 0
    assert sum(last.accepted_by.values()) == last.accepted
    assert {*last.accepted_by} <= {"heads", "lookup"}


def test_what_the_race_measured_of_a_head_counts_from_the_first_draft_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, head = head_models.load(tmp_path, "mimo")
    for source, seconds in (("measured", 0.25), ("predicted", 0.0)):
        cost = scripted.FixedCost({1: 0.25, 16: 1.0}, source)
        monkeypatch.setattr(stream, "cost_of", lambda _, cost=cost: cost)
        decoding = stream._Decoding(model, head, cost, None, is_looking_up=True)
        lookup, own = decoding.decoder._drafters
        assert (lookup.seconds_of_token, own.seconds_of_token) == (0.0, seconds)
    with pytest.raises(ValueError, match="draft_model is the head of another model"):
        stream._Decoding(head_models.trunk("mimo"), head, cost, 0, is_looking_up=True)


def test_what_drafts_did_is_said_in_one_line() -> None:
    given: list[Any] = ["", 0, None, False, 0, 0.0, 95, 0.0, 0.0]
    found = {"drafted": 61, "accepted": 52, "accepted_by": {"lookup": 12, "heads": 40}}
    response = DraftedResponse(*given, passes=50, **found)  # type: ignore[arg-type]
    said = "drafts: 52 of 61 accepted, 1.9 tokens a pass, by heads 40, lookup 12"
    assert response.summary == said


def test_a_head_is_converted_alone(tmp_path: Path) -> None:
    """Its model's layers stay as they are, and are looked up when they are used."""
    model = head_models.trunk("qwen3_5")
    head_models.write(tmp_path, head_models.stored("qwen3_5"))
    head = load_heads(tmp_path, model)
    tokens = mx.array([[1, 2, 3]])
    expected = head(tokens)
    before = {name: id(module) for name, module in model.named_modules()}
    mlx_marlin.optimize(head, measure=False)
    assert {name: id(module) for name, module in model.named_modules()} == before
    kinds = {type(module).__name__ for _, module in head.named_modules()}
    assert "MarlinLinear" in kinds
    assert mx.allclose(head(tokens), expected, rtol=1e-3, atol=1e-3)
    nn.quantize(model, 32, 8)
    assert not mx.array_equal(head(tokens), expected)


_OWN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
DEFINITIONS: dict[str, tuple[str, str, tuple[str, str, str, str], int, float]] = {
    "qwen3_5": ("mtp.", "layers.0.", _OWN, 4, 1e5),
    # As its model's layers without a window
    "exaone_moe": ("mtp.", "layers.0.", _OWN, 0, 1e4),
    "mimo": (
        "model.mtp_layers.0.",
        "",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        16,
        1e4,
    ),
}
"""Where the original has a head, its layer and its four own tensors; how many numbers
of a head are rotated by positions, and the base of that."""


@pytest.mark.parametrize("family", DEFINITIONS)
def test_logits_are_those_of_the_definition_in_float64(
    family: str, tmp_path: Path
) -> None:
    model, head = head_models.load(tmp_path, family)
    start, inner, names, rotated, base = DEFINITIONS[family]
    is_less = family in head_models.ZERO_CENTRED
    tensors = {
        name: np.array(each, np.float64) + (is_less and "norm" in name)
        for name, each in head_models.stored(family).items()
    }
    of_token, of_hidden, weights, last = (tensors[f"{start}{n}.weight"] for n in names)
    tokens, hidden = [9, 4, 60, 4, 31], mx.random.normal((1, 5, 64))
    own: Any = Trunk(model)
    rows = (
        normed(np.array(own.embedded(mx.array(tokens)), np.float64), of_token, 1e-6),
        normed(np.array(hidden[0], np.float64), of_hidden, 1e-6),
    )
    joined = np.concatenate(rows[::-1] if family == "mimo" else rows, axis=-1)
    x = layer(
        joined @ weights.T,
        lambda name: tensors.get(f"{start}{inner}{name}"),
        *(4, 2, 1e-6),
        rotated=rotated,
        base=base,
    )
    expected = normed(x, last, 1e-6) @ np.array(own.text.lm_head.weight, np.float64).T

    found = head(mx.array([tokens]), hidden, head.make_cache())

    assert np.abs(np.array(found[0]) - expected).max() < 1e-4
