"""Writes and reads mlx-lm's KV caches for traced blocks.

A cache then holds the tokens that mlx-lm's own code would have written. Its capacity,
the allocated length of its arrays, may differ.
"""

from functools import cache as remembered
from typing import Any
from weakref import WeakKeyDictionary, ref

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_marlin.backends import selection

ALIGNED = 8
"""The capacity is a multiple of this, so that rows of 16-bit scores are aligned to 16
bytes."""
CUDNN_STEP = 256
"""On CUDA, MLX uses cuDNN for one query of a stream and at least this many tokens, if
the capacity of the cache is a multiple of it (0.32.4). Otherwise it uses
`sdpa_vector`."""
FEW_TOKENS, MORE_TOKENS = 512, 2048
"""`sdpa_vector` is chosen below `FEW_TOKENS`, and above `ONE_PASS` up to `MORE_TOKENS`,
where it is faster on most hosts (one model on an H200, docs/lab). cuDNN takes more host
time and, with many tokens, less GPU time."""
ONE_PASS = 1024
"""Up to this many tokens `sdpa_vector` has one block per head, which is slow for many
tokens. Above it, `sdpa_vector` has 32 blocks per head."""
HALVES = (mx.float16, mx.bfloat16)
FEATURES = (64, 96, 128)
"""Features of a head that both of MLX's kernels support, in the dtypes `HALVES`
(0.32.4)."""


def check_caches() -> None:
    """Checks that mlx-lm's caches have the attributes that this module uses."""
    of_stream: Any = KVCache
    used = "keys", "values", "offset", "update_and_fetch"
    for name in used:
        getattr(of_stream(), name)
    for name in (*used, "_idx", "left_padding"):
        getattr(BatchKVCache([0]), name)


def is_alone(x: mx.array, mask: Any, cache: Any) -> bool:
    """Returns whether a batch is the next token of one stream without padding.

    If so, the mask hides no token unless it has a window, and the host knows the
    position of the stream. Servers create such batches.

    `x`: activations [streams, tokens, k].
    """
    return (
        type(cache) is BatchKVCache
        and type(mask) is mx.array
        and mask.dtype == mx.bool_
        and mask.shape == (1, 1, 1, cache._idx + 1)
        and x.shape[:2] == (1, 1)
        and cache.left_padding.size == 1
        and _is_zero(cache.left_padding)
    )


def _is_zero(padding: mx.array) -> bool:
    """Returns whether the padding of one stream is zero; False if it is traced.

    The array is in host memory. Reading it waits only after streams have left.
    """
    try:
        return padding.item() == 0
    except ValueError:  # a traced array has no value
        return False


def updated(cache: Any, keys: mx.array, values: mx.array) -> Any:
    """Does what `cache.update_and_fetch` does, except that the capacity may differ."""
    is_plain: bool = type(cache) is KVCache
    if is_plain and keys.shape[0] == keys.shape[2] == 1:
        _choose_kernel(cache, cache.offset + 1)
    if not is_plain or not _write(cache, cache.offset, keys, values):
        return cache.update_and_fetch(keys, values)
    cache.offset = end = cache.offset + keys.shape[2]
    return cache.keys[:, :, :end], cache.values[:, :, :end]


def update_whole(cache: Any, keys: mx.array, values: mx.array) -> None:
    """Does what `updated` does, and aligns the capacity, all of which is to be read.

    Beyond its tokens a `KVCache` holds zeros and trimmed tokens.
    """
    updated(cache, keys, values)
    capacity = -(-cache.keys.shape[2] // ALIGNED) * ALIGNED
    if capacity != cache.keys.shape[2]:  # mlx-lm adds whole steps to its tokens
        _resize(cache, cache.offset, capacity)


def updated_alone(cache: Any, keys: mx.array, values: mx.array) -> Any:
    """Does what `updated` does, for a batch of one stream without padding."""
    _choose_kernel(cache, cache._idx + 1)
    if not _write(cache, cache._idx, keys, values):
        return cache.update_and_fetch(keys, values)
    cache._idx = end = cache._idx + keys.shape[2]
    # A new array: the offset is never evaluated, so adding to the previous one would
    # build a graph that grows with each token.
    cache.offset = mx.array([end])
    return cache.keys[:, :, :end], cache.values[:, :, :end]


def _choose_kernel(cache: Any, tokens: int) -> None:
    """Resizes a cache so that MLX chooses the faster attention kernel."""
    if tokens < CUDNN_STEP or not selection.traits().stock_attends_by_capacity:
        return
    is_vector = tokens < FEW_TOKENS or ONE_PASS < tokens <= MORE_TOKENS
    if is_vector == (cache.keys.shape[2] % CUDNN_STEP > 0) or not _is_for_both(cache):
        return
    # With an additional half step the capacity is not a multiple of the step, and
    # remains so, because mlx-lm adds whole steps.
    capacity = (tokens // CUDNN_STEP + 1) * CUDNN_STEP + is_vector * CUDNN_STEP // 2
    _resize(cache, tokens - 1, capacity)


def _is_for_both(cache: Any) -> bool:
    """Returns whether both of MLX's kernels support the heads of a cache."""
    return cache.keys.dtype in HALVES and all(
        array.shape[3] in FEATURES for array in (cache.keys, cache.values)
    )


def _resize(cache: Any, end: int, capacity: int) -> None:
    """Sets the capacity of a cache, and fills it with zeros from `end` on."""
    widths = [(0, 0), (0, 0), (0, capacity - end), (0, 0)]
    cache.keys = mx.pad(cache.keys[:, :, :end], widths)
    cache.values = mx.pad(cache.values[:, :, :end], widths)


def append(cache: Any, keys: mx.array, values: mx.array) -> None:
    """Does what `update_and_fetch` does, and makes the whole capacity readable.

    `keys`: keys of new tokens, [streams, heads, tokens, features].
    """
    if _write(cache, cache._idx, keys, values):
        streams, _, tokens, _ = keys.shape
        cache._idx += tokens
        cache.offset = cache.offset + _steps(streams, tokens, cache.offset.dtype)
    else:
        cache.update_and_fetch(keys, values)
    cleared = _cleared.get(cache)
    if cleared is None or cleared() is not cache.keys:
        _clear(cache)


@remembered
def _steps(streams: int, tokens: int, dtype: mx.Dtype) -> mx.array:
    """Returns the number of tokens as an array with an entry for each stream.

    MLX keeps scalars, and arrays of one or two streams, in host memory, from which the
    GPU takes 23 us to read in each layer (measured, docs/lab).
    """
    return mx.array([tokens] * streams, dtype)


_cleared: WeakKeyDictionary[BatchKVCache, ref[mx.array]] = WeakKeyDictionary()
"""The key arrays of caches whose unused capacity holds finite values: zeros or trimmed
tokens. mlx-lm replaces the array when streams join, leave or were padded on the right,
and when the cache grows."""


def _clear(cache: Any) -> None:
    """Fills the unused capacity of a cache with zeros, and aligns the capacity.

    Padding may hold NaN, and 0 x NaN is NaN.
    """
    end, capacity = cache._idx, cache.keys.shape[2]
    _resize(cache, end, -(-capacity // ALIGNED) * ALIGNED)
    _cleared[cache] = ref(cache.keys)


def _write(cache: Any, start: int, keys: mx.array, values: mx.array) -> bool:
    """Writes keys and values from `start` on. Returns False if the cache is too small.

    MLX parses this index faster than that of mlx-lm, `[..., start:end, :]`.
    """
    end = start + keys.shape[2]
    if cache.keys is None or end > cache.keys.shape[2]:
        return False
    cache.keys[:, :, start:end] = keys
    cache.values[:, :, start:end] = values
    return True
