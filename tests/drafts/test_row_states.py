"""After a rejection each cache is plain decoding's, without rows that are fed again."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial, wraps
from itertools import cycle
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models import qwen3_next
from mlx_lm.models.cache import (
    ArraysCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

import mlx_marlin
from drafts.scripted import PROMPT, ScriptedDrafter, decoder
from mlx_marlin.lm.drafts import row_states
from mlx_marlin.lm.drafts.passes import Passes, leaves
from mlx_marlin.lm.tracing.block import TracedBlock
from support import configurations
from support.architectures import ARCHITECTURES
from support.configurations import CONFIGURATIONS, drawn_parameters, new_model
from support.profiles import sampled

COUNT = 15
pytestmark = pytest.mark.usefixtures("unfused")
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Jamba": (
        "jamba",
        {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1}
        | {"expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 16}
        | {"mamba_expand": 2},
    ),
    "Mamba": (
        "mamba",
        {"state_size": 16, "conv_kernel": 4, "use_conv_bias": True}
        | {"time_step_rank": 8},
    ),
    "Mamba-2": (
        "mamba2",
        {"num_heads": 4, "state_size": 32, "layer_norm_epsilon": 1e-5}
        | {"conv_kernel": 4, "n_groups": 1, "use_conv_bias": True}
        | {"time_step_limit": [0.0, 100.0], "time_step_rank": "auto"},
    ),
    "PLaMo-2": (
        "plamo2",
        {"hidden_size_per_head": 32, "mamba_d_state": 32, "mamba_num_heads": 4},
    ),
    "Ling-2.5": (
        "bailing_hybrid",
        configurations._LATENT | configurations._BAILING | {"layer_group_size": 2},
    ),
    "Ring-linear": (
        "bailing_moe_linear",
        configurations._BAILING | {"layer_group_size": 2},
    ),
    "OLMo-Hybrid": (
        "olmo_hybrid",
        configurations._LINEAR
        | {"linear_allow_neg_eigval": True}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "Gear": ("gear", {"layer_types": ["conv_mixer", "full_attention"]}),
    "Kimi-K3": (
        "kimi_k3",
        {"text_config": configurations._LATENT | configurations._KIMI},
    ),
    "LongCat-Flash-Lite": (
        "longcat_flash_ngram",
        configurations._LATENT
        | configurations._LONGCAT
        | {"emb_neighbor_num": 3}
        | {"emb_split_num": 2, "ngram_vocab_size_ratio": 2},
    ),
    "RWKV-7": (
        "rwkv7",
        {"a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16}
        | {"decay_low_rank_dim": 16},
    ),
    "RecurrentGemma": (
        "recurrent_gemma",
        {"block_types": ["recurrent", "attention"], "attention_window_size": 8}
        | {"conv1d_width": 4, "embeddings_scale_by_sqrt_dim": True}
        | {"logits_soft_cap": 30.0, "lru_width": 128},
    ),
}
"""Configurations as those of `CONFIGURATIONS`."""
FED_AGAIN = {"RWKV-7", "RecurrentGemma", "LongCat-Flash-Lite"}
EXACT = {
    *("Qwen3-Next-80B-A3B", "Qwen3.5-9B", "Qwen3.5-35B-A3B", "Kimi-Linear-48B-A3B"),
    *("Kimi-K3", "Ling-2.6", "OLMo-Hybrid", "LFM2-1.2B", "LFM2-8B-A1B", "Jamba"),
    *("Mamba", "Gear", "Ring-linear"),
}
"""Models whose recurrent layers compute a row alike in passes of any length."""
ALL = CONFIGURATIONS | OTHERS


@lru_cache
def model_of(name: str) -> nn.Module:
    module, own = ALL[name]
    settings = {**configurations.COMMON, **own, "model_type": module}
    if "text_config" in own:
        inner = {"model_type": f"{module}_text"} | own["text_config"]
        settings["text_config"] = {**configurations.COMMON, **inner}
    model = new_model(settings)
    drawn = drawn_parameters(model).items()
    model.load_weights([(path, mx.array(array)) for path, array in drawn])
    mx.eval(model.parameters())
    return model


def held(cache: list[Any]) -> list[tuple[Any, list[mx.array]]]:
    """Returns the offset of each cache and its arrays, windows in temporal order."""
    found = []
    for leaf in leaves(cache):
        if type(leaf) is ArraysCache:
            found.append((None, [mx.array(each) for each in leaf.cache]))
            continue
        arrays = [leaf.keys, leaf.values]
        if type(leaf) is RotatingKVCache:
            rows = min(leaf.offset, leaf.max_size)
            ordered = map(leaf._temporal_order, arrays)
            arrays = [each[..., each.shape[2] - rows :, :] for each in ordered]
        elif type(leaf) is QuantizedKVCache:
            codes = leaf.keys_and_values()
            arrays = [
                mx.dequantize(*each, leaf.group_size, leaf.bits) for each in codes
            ]
        else:
            arrays = [*leaf.keys_and_values()]
        found.append((leaf.offset, arrays))
    mx.eval([arrays for _, arrays in found])
    return found


def plainly(
    model: nn.Module,
    cache: list[Any],
    prompt: list[int],
    quantize: Callable[[list[Any]], None],
) -> tuple[list[int], list[Any]]:
    """Returns the tokens of plain decoding, and what its cache holds with each."""
    model(mx.array([prompt[:-1]]), cache=cache)
    quantize(cache)
    token, tokens, states = prompt[-1], [], []
    for _ in range(COUNT + 1):
        logits = model(mx.array([[token]]), cache=cache)
        quantize(cache)
        token = int(mx.argmax(logits[0, -1]).item())
        tokens.append(token)
        states.append(held(cache))
    return tokens, states[1:]


def assert_same(
    found: list[Any], wanted: list[Any], bound: float, *, is_exact: bool
) -> None:
    """Compares caches; `is_exact`: whether recurrent states are equal bit by bit."""
    for (offset, arrays), (expected, others) in zip(found, wanted, strict=True):
        most = 0.0 if is_exact and offset is None else bound
        assert offset == expected
        for a, b in zip(arrays, others, strict=True):
            assert a.shape == b.shape
            assert mx.allclose(a, b, rtol=most, atol=most).item()


def assert_states(
    model: nn.Module,
    *,
    caches: Callable[[], list[Any]] | None = None,
    quantized_from: int | None = None,
    texts: int = 1,
    is_exact: bool = False,
    is_bounded: bool = False,
) -> Passes:
    """Compares each token's cache; drafts are rejected at each of their positions.

    `texts`: texts that go on with the cache of the one before.
    `is_bounded`: whether a cache may have no room for some of the drafts.
    """
    caches = caches or partial(make_prompt_cache, model)
    quantize = partial(
        maybe_quantize_kv_cache,
        quantized_kv_start=quantized_from or 0,
        kv_group_size=32,
        kv_bits=None if quantized_from is None else 8,
    )
    plain, cache = caches(), caches()
    for nth in range(texts):
        prompt = [*PROMPT[nth:], nth + 1]
        tokens, states = plainly(model, plain, prompt, quantize)
        drafter = ScriptedDrafter([*prompt, *tokens], 4, lambda each: each % 5)
        passes = Passes(model, cache, quantize, quantized_from=quantized_from)
        decoding = decoder(model, drafter, passes=passes)
        found = decoding.tokens(prompt, COUNT)
        for token, expected, state in zip(found, tokens, states, strict=False):
            assert token.token == expected
            bound = 1e-4 if quantized_from is None else 0.02
            assert_same(held(cache), state, bound, is_exact=is_exact)
            assert passes.are_fed_again or token.rows <= 5
        accepted = {accepted for _, accepted in drafter.lengths}
        assert accepted == {*range(5)} or (len(accepted) > 1 and is_bounded)
    return passes


KINDS = {
    *("Qwen3-Next-80B-A3B", "Kimi-Linear-48B-A3B", "Nemotron-3-Nano", "Ring-linear"),
    *("LFM2-1.2B", "Jamba", "Mamba", "Gemma-3-1B", "RWKV-7"),
}
"""Models of which each has another kind of state."""


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_cache_after_a_rejection_is_plain_decodings(name: str) -> None:
    passes = assert_states(model_of(name), is_exact=name in EXACT)
    assert passes.are_fed_again == (name in FED_AGAIN)


@sampled(4, 20)
@pytest.mark.parametrize("name", sorted(ALL.keys() - KINDS))
def test_so_is_that_of_any_other_model(name: str) -> None:
    test_a_cache_after_a_rejection_is_plain_decodings(name)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-Next-80B-A3B", "Jamba"])
@pytest.mark.parametrize("start", [0, len(PROMPT) + 5])
def test_so_is_one_that_is_quantized_and_used_again(name: str, start: int) -> None:
    assert_states(model_of(name), quantized_from=start, texts=2, is_bounded=True)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "Nemotron-3-Nano"])
def test_so_is_one_that_is_used_again(name: str) -> None:
    assert_states(model_of(name), texts=2)


def test_so_is_one_of_a_size() -> None:
    model = model_of("Llama-3.1-8B")
    caches = partial(make_prompt_cache, model, max_kv_size=24)
    assert_states(model, caches=caches, is_bounded=True)


NEXT = "Qwen3-Next-80B-A3B"
update, layer = qwen3_next.gated_delta_update, qwen3_next.Qwen3NextGatedDeltaNet
of_layer, of_convolution = layer.__call__, nn.Conv1d.__call__


def renamed(*given: Any, before: Any = None, **options: Any) -> Any:
    return update(*given, **options)


def drifting() -> Callable[..., Any]:
    """Returns an update whose state depends on how often it was called."""
    factors = cycle([1, 1 + 2**-23])

    @wraps(update)
    def of(*given: Any, **options: Any) -> Any:
        found, state = update(*given, **options)
        return found, state * next(factors)

    return of


def copying(self: Any, inputs: mx.array, mask: Any = None, cache: Any = None) -> Any:
    found = of_layer(self, inputs, mask, cache)
    cache[1] = mx.array(cache[1])
    return found


@pytest.mark.parametrize(
    ("owner", "name", "other", "reason"),
    [
        (qwen3_next, "gated_delta_update", renamed, "gated_delta_update has no"),
        (qwen3_next, "gated_delta_update", drifting(), "otherwise than is known"),
        (layer, "__call__", copying, "otherwise than is known"),
    ],
)
def test_where_mlx_lm_has_changed_rows_are_fed_again_with_one_message(
    owner: Any, name: str, other: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, other)
    with pytest.warns(RuntimeWarning, match=f"accepted tokens .* {reason}"):
        assert assert_states(model_of(NEXT)).are_fed_again
    assert assert_states(model_of(NEXT)).are_fed_again  # and no other message


@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_sees_its_own_threads_calls_and_leaves_mlx_lm_as_it_was(
    fails: bool,
) -> None:
    model, cache = model_of(NEXT), make_prompt_cache(model_of(NEXT))
    passes = Passes(model, cache)
    passes.feed(PROMPT)
    before = held(cache)

    def beside(tokens: mx.array, cache: list[Any]) -> mx.array:
        found: mx.array = model(tokens, cache=cache)
        assert qwen3_next.gated_delta_update is not update
        convolution = nn.Conv1d(4, 4, 2)
        given = mx.zeros((1, 8, 4))
        thread = threading.Thread(target=lambda: convolution(given))
        thread.start()
        thread.join()
        if fails:
            raise RuntimeError("as asked")
        return found

    passes._model = beside  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="as asked") if fails else nullcontext():
        passes.run(mx.array([3, 4, 5]), 3)
    passes.keep(len(PROMPT))
    assert_same(held(cache), before, 0.0, is_exact=True)
    assert not passes.are_fed_again
    assert qwen3_next.gated_delta_update is update
    assert nn.Conv1d.__call__ is of_convolution


@pytest.mark.parametrize("kept", range(5))
def test_as_many_states_of_a_draft_model_are_kept_as_its_memory_allows(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = model_of(NEXT), make_prompt_cache(model_of(NEXT))
    passes = Passes(model, cache)
    passes.feed(PROMPT)
    size = sum(leaf.nbytes for leaf in cache if type(leaf) is ArraysCache)
    assert size > 1000
    monkeypatch.setattr(row_states, "_memory", lambda: 50 * (2 * size + size // 2))
    passes.begin(4, passes=4)
    for token in (3, 4, 5, 6):
        passes.run(mx.array([token]))
    passes.keep(len(PROMPT) + kept)
    assert passes.fed == len(PROMPT) + (kept if kept in (0, 1, 2, 4) else 2)
    expected = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=expected)
    for token in (3, 4, 5, 6)[: passes.fed - len(PROMPT)]:
        model(mx.array([[token]]), cache=expected)
    assert_same(held(cache), held(expected), 0.0, is_exact=True)


@pytest.mark.slow
def test_layers_of_optimized_blocks_are_seen() -> None:
    """Blocks with a recurrent layer are not traced, and run mlx-lm's own code."""
    architecture = ARCHITECTURES["qwen3_next"]
    model = architecture.model(*architecture.formats[0])
    mlx_marlin.optimize(model, trace=True)
    assert any(isinstance(block, TracedBlock) for block in model.modules())
    cache, expected = make_prompt_cache(model), make_prompt_cache(model)
    passes = Passes(model, cache)
    for kept in (2, 3):
        text = [*range(passes.fed, passes.fed + 4)]
        passes.run(mx.array(text), 4)
        passes.keep(passes.fed - 4 + kept)
        model(mx.array([text[:kept]]), cache=expected)
        assert_same(held(cache), held(expected), 1e-4, is_exact=False)
    assert passes.fed == 5
