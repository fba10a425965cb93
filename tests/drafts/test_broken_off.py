"""Decoding that ends early: by an end token, an error, or a caller who stops."""

from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_marlin
from drafts.scripted import ScriptedDrafter, decoder, plain
from drafts.test_decoding import COUNT, PROMPT, model_of
from drafts.test_stream import TEXT, loaded
from mlx_marlin.lm.drafts import install, stream
from mlx_marlin.lm.drafts.drafters import ModelDrafter
from mlx_marlin.lm.drafts.passes import Passes

__all__ = ["loaded"]


def same_state(model: nn.Module, cache: list[Any], text: list[int]) -> bool:
    """Returns whether a cache goes on as one that was fed a text."""
    expected = make_prompt_cache(model)
    model(mx.array([text]), cache=expected)
    following = mx.array([[3]])
    found, wanted = (model(following, cache=each)[0, -1] for each in (cache, expected))
    return bool(mx.allclose(found, wanted, rtol=1e-3, atol=1e-3).item())


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mamba2", "qwen3_next"])
@pytest.mark.parametrize("fails_at", [1, 2, 3, 9])
def test_a_cache_has_what_was_yielded_after_an_error(name: str, fails_at: int) -> None:
    model = model_of(name)
    text, _ = plain(model, PROMPT, COUNT)
    cache, asked = make_prompt_cache(model), 0

    def sampler(logprobs: mx.array) -> mx.array:
        nonlocal asked
        asked += 1
        if asked == fails_at:
            raise RuntimeError("the sampler")
        return mx.argmax(logprobs, axis=-1)

    drafter = ScriptedDrafter(PROMPT + text, 4, lambda nth: 4 - nth % 3)
    decoding = decoder(model, drafter, cache=cache, sampler=sampler)
    found: list[int] = []
    with pytest.raises(RuntimeError, match="the sampler"):
        found.extend(each.token for each in decoding.tokens(PROMPT, COUNT))

    assert same_state(model, cache, PROMPT + found)


def test_an_error_of_a_plain_step_after_drafts(loaded: tuple[nn.Module, Any]) -> None:
    """A step is begun before the last token is read; nothing was kept before it."""
    model = model_of("llama")
    cache, asked, found = make_prompt_cache(model), 0, []
    text, _ = plain(model, PROMPT, COUNT)

    class Once(ScriptedDrafter):
        def probabilities(self, most: int) -> list[float]:
            return [] if len(self.lengths) == 2 else super().probabilities(most)

    def sampler(logprobs: mx.array) -> mx.array:
        nonlocal asked
        asked += 1
        if asked == 14:  # two drafts of four tokens, two steps, and two begun ones
            raise RuntimeError("the sampler")
        return mx.argmax(logprobs, axis=-1)

    drafter = Once(PROMPT + text, 4, lambda nth: 4)
    decoding = decoder(model, drafter, cache=cache, sampler=sampler)
    with pytest.raises(RuntimeError, match="the sampler"):
        found.extend(each.token for each in decoding.tokens(PROMPT, COUNT))

    assert len(drafter.lengths) == 2
    assert same_state(model, cache, PROMPT + found)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mamba2", "qwen3_next"])
@pytest.mark.parametrize("stop", [1, 2, 5, 8])
def test_a_draft_models_cache_has_what_was_yielded(name: str, stop: int) -> None:
    model = model_of(name)
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


def test_what_was_accepted_is_counted_as_it_is_yielded(
    loaded: tuple[nn.Module, Any],
) -> None:
    model, tokenizer = loaded
    found = [*mlx_marlin.stream_generate(model, tokenizer, TEXT, 40, lookup=True)]

    assert any(each.from_draft and each.rows > 2 for each in found)
    drafted = [each.from_draft for each in found]
    assert [each.accepted for each in found] == [*accumulate(drafted)]


def test_none_is_no_draft_model(
    loaded: tuple[nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    asked: list[Any] = []

    def noted(*given: Any, **options: Any) -> Any:
        asked.append(options["lookup"])
        return iter(())

    monkeypatch.setattr(install, "stream_generate", noted)
    install._looking_up(model, tokenizer, TEXT, 3, None)
    install._looking_up(model, tokenizer, TEXT, 3, model)
    assert asked == [True, False]
    assert stream.without_drafts is mlx_lm.stream_generate
