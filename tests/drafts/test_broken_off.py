"""Decoding that ends early: by an end token, an error, or a caller who stops."""

from collections.abc import Callable
from itertools import count
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
from drafts.test_stream import TEXT, loaded
from mlx_marlin.lm.drafts.drafters import ModelDrafter
from mlx_marlin.lm.drafts.passes import Passes

__all__ = ["loaded"]


NAMES = ["llama", "gpt_oss", "mamba2", "qwen3_next"]


def failing_at(turn: int) -> Callable[[mx.array], mx.array]:
    """Returns a sampler that fails when it is asked so many times."""
    asked = count(1)

    def sampler(logprobs: mx.array) -> mx.array:
        if next(asked) == turn:
            raise RuntimeError("the sampler")
        return mx.argmax(logprobs, axis=-1)

    return sampler


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fails_at", [1, 2, 3, 9])
@pytest.mark.usefixtures("unfused")
def test_a_cache_has_what_was_yielded_after_an_error(name: str, fails_at: int) -> None:
    model, text, _ = text_of(name)
    cache = make_prompt_cache(model)
    drafter = ScriptedDrafter(PROMPT + text, 4, lambda nth: 4 - nth % 3)
    decoding = decoder(model, drafter, cache=cache, sampler=failing_at(fails_at))
    found: list[int] = []
    with pytest.raises(RuntimeError, match="the sampler"):
        found.extend(each.token for each in decoding.tokens(PROMPT, COUNT))

    assert same_state(model, cache, PROMPT + found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stop", [1, 2, 3, 5, 8, 9, 12, 13])
@pytest.mark.usefixtures("unfused")
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


def test_an_error_of_a_plain_step_after_drafts() -> None:
    """A step is begun before the last token is read; nothing was kept before it."""
    model, text, _ = text_of("llama")
    cache: list[Any] = make_prompt_cache(model)
    found: list[int] = []

    class Once(ScriptedDrafter):
        def probabilities(self, most: int) -> list[float]:
            return [] if len(self.lengths) == 2 else super().probabilities(most)

    drafter = Once(PROMPT + text, 4, lambda nth: 4)
    # Two drafts of four tokens, two steps, and two begun ones.
    decoding = decoder(model, drafter, cache=cache, sampler=failing_at(14))
    with pytest.raises(RuntimeError, match="the sampler"):
        found.extend(each.token for each in decoding.tokens(PROMPT, COUNT))

    assert len(drafter.lengths) == 2
    assert same_state(model, cache, PROMPT + found)


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
