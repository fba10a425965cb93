"""Decoding that ends early: by an end token, an error, or a caller who stops."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_marlin
from drafts.scripted import (
    COUNT,
    PROMPT,
    ScriptedDrafter,
    decoder,
    same_state,
    text_of,
)
from drafts.test_cache_states import MODELS, assert_state, steps_of
from drafts.test_stream import TEXT, loaded
from mlx_marlin.lm.drafts.decoder import Positions
from mlx_marlin.lm.drafts.drafters import ModelDrafter
from mlx_marlin.lm.drafts.passes import Passes
from support.profiles import sampled

__all__ = ["loaded"]
pytestmark = pytest.mark.usefixtures("unfused")


NAMES = ["llama", "gpt_oss", "mamba2", "qwen3_next"]


class Failing:
    """A function that is asked so many times and then fails, when it has worked."""

    def __init__(self, works: Callable[..., Any], turn: int) -> None:
        self.works, self.turns = works, turn

    def __call__(self, *given: Any, **options: Any) -> Any:
        self.turns -= 1
        result = self.works(*given, **options)
        if not self.turns:
            raise RuntimeError("as asked")
        return result


def greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def unchanged(_: mx.array, logits: mx.array) -> mx.array:
    return logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fails_at", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("what", ["sampler", "processor", "model", "read"])
@sampled(24)
def test_a_cache_has_what_was_yielded_after_an_error(
    name: str, fails_at: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, steps = MODELS[name](), steps_of(name)
    text = [*PROMPT, *(step.token for step in steps)]
    cache = make_prompt_cache(model)
    drafter = ScriptedDrafter(text, 4, lambda nth: (2, 9, 0, 4)[nth % 4])
    options: dict[str, Any] = {}
    passes = Passes(model, cache)
    if what == "sampler":
        options["sampler"] = Failing(greedy, fails_at)
    elif what == "processor":
        options["processors"] = [Failing(unchanged, fails_at)]
    elif what == "model":
        # Not the prompt's pass.
        passes._model = Failing(model, fails_at + 1)  # type: ignore[assignment]
    else:
        monkeypatch.setattr(
            Positions, "read", read := Failing(Positions.read, fails_at)
        )
        monkeypatch.setattr(Positions, "read", lambda each: read(each))
    decoding = decoder(model, drafter, passes=passes, **options)
    found: list[int] = []
    with pytest.raises(RuntimeError, match="as asked"):
        found.extend(each.token for each in decoding.tokens(PROMPT, len(steps)))

    assert found == [step.token for step in steps[: len(found)]]
    if found:
        assert_state(model, cache, steps[len(found) - 1])
    else:
        assert same_state(model, cache, PROMPT)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stop", [1, 2, 3, 5, 8, 9, 12, 13])
def test_a_cache_has_what_was_yielded_when_decoding_is_closed(
    name: str, stop: int
) -> None:
    model, text, _ = text_of(name)
    cache = make_prompt_cache(model)
    drafter = ScriptedDrafter(PROMPT + text, 4, lambda nth: 4 - nth % 3)
    tokens = decoder(model, drafter, cache=cache).tokens(PROMPT, COUNT)
    found = [next(tokens).token for _ in range(stop)]

    tokens.close()

    assert found == text[:stop]
    assert same_state(model, cache, PROMPT + found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fails_at", [2, 5])
def test_a_cache_has_what_was_yielded_after_an_error_of_a_plain_step(
    name: str, fails_at: int
) -> None:
    """It is begun before the token that it feeds is read."""
    model, steps = MODELS[name](), steps_of(name)
    cache, sampler = make_prompt_cache(model), Failing(greedy, fails_at)
    decoding = decoder(
        model, ScriptedDrafter(PROMPT, 0, int), cache=cache, sampler=sampler
    )
    found: list[int] = []
    with pytest.raises(RuntimeError, match="as asked"):
        found.extend(each.token for each in decoding.tokens(PROMPT, len(steps)))

    assert len(found) == fails_at - 2
    if found:
        assert_state(model, cache, steps[len(found) - 1])
    else:
        assert same_state(model, cache, PROMPT)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stop", [1, 2, 5, 8])
def test_a_draft_models_cache_has_what_was_yielded(name: str, stop: int) -> None:
    model = text_of(name).model
    cache, own = make_prompt_cache(model), make_prompt_cache(model)
    drafter = ModelDrafter(Passes(model, own))
    tokens = decoder(model, drafter, cache=cache).tokens(PROMPT, COUNT)
    found = [next(tokens).token for _ in range(stop)]

    tokens.close()

    assert same_state(model, own, PROMPT + found)
    assert same_state(model, cache, PROMPT + found)


@pytest.mark.parametrize("most", [1, 12])
def test_a_list_of_both_caches_is_the_callers(
    loaded: tuple[nn.Module, Any], most: int
) -> None:
    """Quantizing puts other caches into a list."""
    model, tokenizer = loaded
    cache = make_prompt_cache(model) + make_prompt_cache(model)
    prompt = tokenizer.encode(TEXT)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}

    found = [
        each.token
        for each in mlx_marlin.stream_generate(
            model, tokenizer, prompt, most, model, prompt_cache=cache, **options
        )
    ]

    assert {type(each).__name__ for each in cache} == {"QuantizedKVCache"}
    assert {each.offset for each in cache} == {len(prompt) + len(found)}
