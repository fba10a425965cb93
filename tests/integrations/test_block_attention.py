"""Attention of traced blocks: what is computed, and what the cache holds after it."""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache
from numpy.typing import NDArray

from mlx_marlin.lm.tracing import attention, kv_cache
from mlx_marlin.lm.tracing.attention import attend
from support.choose import Choose

FEATURES = 32
SCALE = 0.3
PADDING = [0, 5, 2]
Floats = NDArray[np.float64]
Groups = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""The shapes of q and of keys for which heads attended together."""


@pytest.fixture(autouse=True)
def cuda(backend: Choose) -> None:
    backend("cuda")


def drawn(
    heads: int,
    tokens: int,
    dtype: mx.Dtype = mx.float16,
    streams: int = len(PADDING),
    features: int = FEATURES,
) -> mx.array:
    # Several tokens are contiguous before heads, as before a cache.
    y = mx.random.normal((streams, tokens, heads, features)).astype(dtype)
    return y.transpose(0, 2, 1, 3)


def one_token(streams: int = len(PADDING)) -> Iterator[mx.array]:
    """Draws q, k and v of one token."""
    return (drawn(heads, 1, streams=streams) for heads in (4, 2, 2))


def filled(
    length: int, kv_heads: int, padding: list[int], dtype: mx.Dtype = mx.float16
) -> BatchKVCache:
    """Returns a cache that mlx-lm has filled; the same one each time."""
    mx.random.seed(length)
    cache = BatchKVCache(padding)
    if length:
        prompt = drawn(kv_heads, length, dtype, len(padding))
        cache.update_and_fetch(prompt, prompt + 1)
    return cache


def exactly(
    queries: mx.array, keys: mx.array, values: mx.array, padding: list[int]
) -> Floats:
    """Computes attention in float64, head by head."""
    q, k, v = (
        np.array(each.astype(mx.float32), float) for each in (queries, keys, values)
    )
    streams, heads, tokens, _ = q.shape
    shared, first = heads // k.shape[1], k.shape[2] - tokens
    y = np.zeros((*q.shape[:3], v.shape[3]))
    for stream, head, token in np.ndindex(streams, heads, tokens):
        seen = slice(padding[stream], first + token + 1)
        scores = k[stream, head // shared, seen] @ q[stream, head, token] * SCALE
        weights = np.exp(scores - scores.max())
        y[stream, head, token] = (
            weights @ v[stream, head // shared, seen] / weights.sum()
        )
    return y


def assert_near(y: mx.array, expected: Floats) -> None:
    error = np.array(y.astype(mx.float32), float) - expected
    limit = {mx.float16: 1e-3, mx.bfloat16: 6e-3, mx.float32: 1e-6}[y.dtype]
    assert y.shape == expected.shape
    assert np.linalg.norm(error) <= limit * np.linalg.norm(expected)


@pytest.mark.cuda  # where there is a device, on it
@pytest.mark.parametrize(
    "dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (7, 1), (8, 2)])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("length", [9, 255, 256])
def test_masked_heads_attend_together(
    grouped: Groups,
    length: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    dtype: mx.Dtype,
) -> None:
    cache, own = (filled(length, kv_heads, PADDING, dtype) for _ in range(2))
    q, k, v = (drawn(each, tokens, dtype) for each in (heads, kv_heads, kv_heads))

    y = attend(q, k, v, cache, cache.make_mask(tokens), SCALE)

    keys, values = own.update_and_fetch(k, v)
    expected = exactly(q, keys, values, PADDING)
    assert [shape for shape, _ in grouped] == [q.shape]
    assert y.dtype == dtype
    assert_near(y, expected)
    assert_same(cache, own)


@pytest.mark.cuda
@pytest.mark.parametrize("alone", [False, True], ids=["generate", "server"])
@pytest.mark.parametrize("length", [254, 255, 300, 510, 511, 1023, 1024, 2047, 2048])
def test_a_stream_attends_whichever_kernel_mlx_takes(length: int, alone: bool) -> None:
    mx.random.seed(length)
    cache: Any = BatchKVCache([0]) if alone else KVCache()
    shape: tuple[Any, ...] = mx.float16, 1, 64  # features that both kernels take
    keys = drawn(2, length, *shape)
    cache.update_and_fetch(keys, keys + 1)
    q, k, v = (drawn(heads, 1, *shape) for heads in (8, 2, 2))

    y = attend(q, k, v, cache, None, SCALE, alone=alone)

    keys, values = (mx.concatenate(each, axis=2) for each in ((keys, k), (keys + 1, v)))
    assert_near(y, exactly(q, keys, values, [0]))


def assert_same(cache: BatchKVCache, own: BatchKVCache) -> None:
    assert cache._idx == own._idx
    assert mx.array_equal(cache.offset, own.offset)
    for ours, theirs in zip(
        cache.keys_and_values(), own.keys_and_values(), strict=True
    ):
        assert mx.array_equal(ours, theirs)


def test_float32_and_values_of_another_size(grouped: Groups) -> None:
    cache, own = BatchKVCache(PADDING), BatchKVCache(PADDING)
    q, keys, values = (drawn(heads, 20, mx.float32) for heads in (4, 2, 2))
    for each in (cache, own):
        each.update_and_fetch(keys[:, :, 1:], values[:, :, 1:, :24])
    new = keys[:, :, :1], values[:, :, :1, :24]

    y = attend(q[:, :, :1], *new, cache, cache.make_mask(1), SCALE)

    assert len(grouped) == 1
    assert_near(y, exactly(q[:, :, :1], *own.update_and_fetch(*new), PADDING))


def assert_attends(cache: BatchKVCache, own: BatchKVCache, padding: list[int]) -> None:
    """Compares three tokens of a cache with float64, and mlx-lm's cache after them."""
    for seed in range(3):
        mx.random.seed(seed)
        q, k, v = one_token(len(padding))
        y = attend(q, k, v, cache, cache.make_mask(1), SCALE)
        assert_near(y, exactly(q, *own.update_and_fetch(k, v), padding))
    assert_same(cache, own)


@pytest.mark.parametrize("hole", [np.nan, np.inf])
def test_what_padding_left_is_not_read(hole: float, grouped: Groups) -> None:
    caches = BatchKVCache([0, 0]), BatchKVCache([0, 0])
    tokens = drawn(2, 20, streams=2)
    tokens[1, :, 17:] = hole  # padding on the right of the second stream
    for each in caches:
        each.prepare(right_padding=[0, 3])
        each.update_and_fetch(tokens[:, :, :13], tokens[:, :, :13])
        each.update_and_fetch(tokens[:, :, 13:], tokens[:, :, 13:])
        each.finalize()

    assert_attends(*caches, [0, 3])

    assert len(grouped) == 3


def test_a_cache_is_cleared_and_aligned_when_it_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[int] = []
    own = kv_cache._clear

    def listed(cache: BatchKVCache) -> None:
        own(cache)
        lengths.append(cache.keys.shape[2])

    monkeypatch.setattr(kv_cache, "_clear", listed)
    cache = filled(250, 2, PADDING)
    for token in range(12):
        if token == 10:
            cache.filter(mx.array([1, 2]))  # takes two places away
        attend(*one_token(len(cache.offset)), cache, cache.make_mask(1), SCALE)

    assert lengths == [256, 512, 512]
    assert cache._idx == 260
    assert not cache.keys[:, :, 260:].any().item()


def test_a_cache_that_streams_leave_and_join_is_read(grouped: Groups) -> None:
    caches = filled(20, 2, [4, 9, 6]), filled(20, 2, [4, 9, 6])
    for cache in caches:
        cache.filter(mx.array([1, 2]))  # moves what is left to the front
        cache.extend(filled(30, 2, [3]))
        cache.trim(2)

    assert_attends(*caches, [19, 16, 3])

    assert len(grouped) == 3


def test_a_stream_that_sees_nothing_gives_numbers(grouped: Groups) -> None:
    cache = filled(255, 2, [0, 256, 300])
    cache.keys = mx.ones_like(cache.keys)
    q, k, v = mx.full((3, 4, 1, FEATURES), -100.0, mx.float16), drawn(2, 1), drawn(2, 1)

    y = attend(q, mx.ones_like(k), v, cache, cache.make_mask(1), SCALE)

    assert len(grouped) == 1
    assert cache._idx == cache.keys.shape[2] == 256  # no empty place helps
    assert mx.isfinite(y).all().item()


def test_layers_of_a_token_share_what_the_mask_adds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, ...]] = []
    own = attention._masking

    def listed(mask: mx.array, *others: Any) -> mx.array:
        made.append(mask.shape)
        return own(mask, *others)

    monkeypatch.setattr(attention, "_masking", listed)
    layers = [filled(8, 2, PADDING) for _ in range(3)]
    for _ in range(2):
        mask = layers[0].make_mask(1)
        for cache in layers:
            attend(*one_token(), cache, mask, SCALE)

    assert made == [(3, 1, 1, 9), (3, 1, 1, 10)]


def test_arrays_that_are_gone_are_not_kept() -> None:
    known = len(kv_cache._cleared)
    cache = filled(8, 2, PADDING)
    attend(*one_token(), cache, cache.make_mask(1), SCALE)
    keys = ref(cache.keys)
    assert keys() is cache.keys

    cache.filter(mx.array([0, 2]))
    assert keys() is None

    assert len(kv_cache._cleared) == known + 1
    del cache
    assert len(kv_cache._cleared) == known


def test_what_a_mask_adds_is_kept_as_long_as_the_mask() -> None:
    cache = filled(8, 2, PADDING)
    masks = []
    for _ in range(2):
        masks.append(cache.make_mask(1))
        attend(*one_token(), cache, masks[-1], SCALE)
    kept = attention._last_summands

    del masks[0]  # late: it takes its own sums only

    assert attention._last_summands is kept is not None
    masks.clear()
    assert attention._last_summands is None


def test_a_mask_is_made_again_for_other_heads_and_dtypes() -> None:
    caches = (
        filled(8, 2, PADDING),
        filled(8, 1, PADDING),
        filled(8, 2, PADDING, mx.bfloat16),
    )
    mask = caches[0].make_mask(1)

    for cache in caches:
        _, kv_heads, _, _ = cache.keys.shape
        dtype = cache.keys.dtype
        q, k, v = (drawn(each, 1, dtype) for each in (4, kv_heads, kv_heads))
        y = attend(q, k, v, cache, mask, SCALE)
        assert y.dtype == dtype
        expected = exactly(q, *cache.keys_and_values(), PADDING)
        assert_near(y, expected)


def of_a_batch() -> BatchKVCache:
    return filled(8, 2, PADDING)


def unmasked() -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(drawn(2, 8), drawn(2, 8))
    return cache


def rotating() -> BatchRotatingKVCache:
    cache = BatchRotatingKVCache(6, PADDING)
    cache.update_and_fetch(drawn(2, 8), drawn(2, 8))
    return cache


@pytest.mark.parametrize(
    ("make", "heads", "mask", "backend_name", "transformed"),
    [
        (unmasked, 4, None, "cuda", False),
        (unmasked, 4, "causal", "cuda", False),
        (unmasked, 4, mx.ones((3, 1, 1, 9), mx.bool_), "cuda", False),
        (rotating, 4, "made", "cuda", False),
        (of_a_batch, 2, "made", "cuda", False),  # each head has keys of its own
        (of_a_batch, 4, mx.zeros((3, 1, 1, 9), mx.float16), "cuda", False),
        (of_a_batch, 4, mx.ones((3, 4, 1, 9), mx.bool_), "cuda", False),
        (of_a_batch, 4, mx.ones((1, 9), mx.bool_), "cuda", False),
        (of_a_batch, 4, None, "cuda", False),
        (of_a_batch, 4, "made", "cuda", True),
        (of_a_batch, 4, "made", "metal", False),  # where MLX has a kernel
        (of_a_batch, 4, "made", "stock", False),
    ],
)
def test_other_calls_are_mlx_lms(
    grouped: Groups,
    backend: Choose,
    make: Callable[[], Any],
    heads: int,
    mask: Any,
    backend_name: str,
    transformed: bool,
) -> None:
    backend(backend_name)
    mx.random.seed(1)
    cache = make()
    mx.random.seed(1)
    own = make()
    q, k, v = (drawn(each, 1) for each in (heads, 2, 2))
    mask = cache.make_mask(1) if isinstance(mask, str) and mask == "made" else mask

    y = attend(q, k, v, cache, mask, SCALE, transformed=transformed)

    keys, values = own.update_and_fetch(k, v)
    expected = mx.fast.scaled_dot_product_attention(
        q, keys, values, scale=SCALE, mask=mask
    )
    assert grouped == []
    assert mx.array_equal(y, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("length", [0, 9, 250, 300])
@pytest.mark.parametrize(("tokens", "heads"), [(2, 4), (5, 2), (32, 6)])
def test_few_rows_attend_in_one_shape_for_all_lengths_of_a_step(
    grouped: Groups, length: int, tokens: int, heads: int
) -> None:
    """Views of the filled part would be planned anew by cuDNN for each length."""
    cache: Any = KVCache()
    if length:
        prompt = drawn(2, length, streams=1)
        cache.update_and_fetch(prompt, prompt + 1)
    for _ in range(2):
        q, k, v = (drawn(each, tokens, streams=1) for each in (heads, 2, 2))
        y = attend(q, k, v, cache, "causal", SCALE)
        keys, values = (
            each[:, :, : cache.offset] for each in (cache.keys, cache.values)
        )
        assert_near(y, exactly(q, keys, values, [0]))
    assert cache.offset == length + 2 * tokens
    assert len(grouped) == 2
    assert all(shape[2] % kv_cache.ALIGNED == 0 for _, shape in grouped)
    assert grouped[0] == grouped[1] or cache.offset > 256


@pytest.mark.parametrize(
    ("tokens", "mask", "backend_name", "options"),
    [
        (33, "causal", "cuda", {}),
        (4, None, "cuda", {}),
        (1, "causal", "cuda", {}),
        (4, "causal", "metal", {}),
        (4, "causal", "cuda", {"transformed": True}),
        (4, "causal", "cuda", {"sinks": mx.zeros}),
    ],
)
def test_many_rows_and_other_calls_of_a_stream_are_mlx_lms(
    grouped: Groups,
    backend: Choose,
    tokens: int,
    mask: str | None,
    backend_name: str,
    options: dict[str, Any],
) -> None:
    backend(backend_name)
    if "sinks" in options:
        options = {"sinks": mx.zeros((4,), mx.float16)}
    q, k, v = (drawn(each, tokens, streams=1) for each in (4, 2, 2))

    y = attend(q, k, v, KVCache(), mask, SCALE, **options)

    assert grouped == []
    assert mx.array_equal(
        y,
        mx.fast.scaled_dot_product_attention(
            q, k, v, scale=SCALE, mask=mask, sinks=options.get("sinks")
        ),
    )


def test_a_mask_with_a_window_is_kept(grouped: Groups) -> None:
    cache, own = filled(20, 2, PADDING), filled(20, 2, PADDING)
    mask = create_causal_mask(
        1, offset=20, window_size=4, left_padding=cache.left_padding
    )
    q, k, v = one_token()

    y = attend(q, k, v, cache, mask, SCALE)

    keys, values = (each[:, :, -4:] for each in own.update_and_fetch(k, v))
    expected = exactly(q, keys, values, [0, 0, 0])
    assert len(grouped) == 1
    assert_near(y, expected)
