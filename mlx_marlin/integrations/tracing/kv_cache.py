"""Caches of mlx-lm, as a traced block writes and reads them.

What they hold after it is what mlx-lm's own code would have left there; the number of
places beyond that may be another.
"""

from functools import cache as remembered
from typing import Any
from weakref import WeakKeyDictionary, ref

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_marlin.backends import selection

ALIGNED = 8
"""Places of a cache are a multiple: rows of 16-bit scores begin at whole 16 bytes."""
CUDNN_STEP = 256
"""On CUDA, MLX lets cuDNN attend to so many tokens or more, if a stream's query is one
and the places of its cache are a multiple of it (0.32.4); else `sdpa_vector`."""
FEW_TOKENS, MORE_TOKENS = 512, 2048
"""`sdpa_vector` is taken for fewer tokens than the first, and beyond `ONE_PASS` up to
the second: on most hosts it is faster then (of one model on an H200, docs/lab).
cuDNN takes the host more, and of many tokens the GPU less."""
ONE_PASS = 1024
"""Tokens up to which `sdpa_vector` has one block a head, which many of them slow down;
beyond it has 32."""
HALVES = (mx.float16, mx.bfloat16)
FEATURES = (64, 96, 128)
"""Of a head: both of MLX's kernels take these, in these dtypes (0.32.4)."""


def check_caches() -> None:
    """Checks that mlx-lm's caches have the attributes that are used here.

    Raises:
        AttributeError: If one of them is missing.
    """
    of_stream: Any = KVCache
    used = "keys", "values", "offset", "update_and_fetch"
    for name in used:
        getattr(of_stream(), name)
    for name in (*used, "_idx", "left_padding"):
        getattr(BatchKVCache([0]), name)


def is_alone(x: mx.array, mask: Any, cache: Any) -> bool:
    """Returns whether a batch is the next token of one stream, without padding.

    Then mlx-lm's mask for the cache hides nothing, where no window is part of it; and
    the stream's place is a number that the host knows. Servers have such batches.

    Args:
        x: Activations [streams, tokens, k].
        mask: What `create_attention_mask` makes for the cache.
        cache: Any of mlx-lm's.
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
    """Returns whether a stream has no padding, if that can be known.

    The array lies where the host writes, and is waited for only after streams left.
    """
    try:
        return padding.item() == 0
    except ValueError:  # MLX traces it: what it will be, nobody knows
        return False


def updated(cache: Any, keys: mx.array, values: mx.array) -> Any:
    """Does what `cache.update_and_fetch` does, but for the number of places."""
    is_plain: bool = type(cache) is KVCache
    if not is_plain:
        return cache.update_and_fetch(keys, values)
    if keys.shape[0] == keys.shape[2] == 1:
        _choose_kernel(cache, cache.offset + 1)
    if not _write(cache, cache.offset, keys, values):
        return cache.update_and_fetch(keys, values)
    cache.offset = end = cache.offset + keys.shape[2]
    return cache.keys[:, :, :end], cache.values[:, :, :end]


def updated_alone(cache: Any, keys: mx.array, values: mx.array) -> Any:
    """Does what `updated` does, for a stream alone in a batch."""
    _choose_kernel(cache, cache._idx + 1)
    if not _write(cache, cache._idx, keys, values):
        return cache.update_and_fetch(keys, values)
    cache._idx = end = cache._idx + keys.shape[2]
    # Nobody reads the one before: what is computed from it would be, token by token,
    # a chain of sums that is never evaluated.
    cache.offset = mx.array([end])
    return cache.keys[:, :, :end], cache.values[:, :, :end]


def _choose_kernel(cache: Any, tokens: int) -> None:
    """Gives a cache the places with which MLX attends faster to so many tokens.

    All of these tokens but the last are in it.
    """
    if tokens < CUDNN_STEP or selection.backend() != "cuda":
        return
    is_vector = tokens < FEW_TOKENS or ONE_PASS < tokens <= MORE_TOKENS
    if is_vector == (cache.keys.shape[2] % CUDNN_STEP > 0) or not _is_for_both(cache):
        return
    # Half a step more is no multiple, and stays none as mlx-lm adds whole steps.
    places = (tokens // CUDNN_STEP + 1) * CUDNN_STEP + is_vector * CUDNN_STEP // 2
    _resize(cache, tokens - 1, places)


def _is_for_both(cache: Any) -> bool:
    """Returns whether both kernels take such heads."""
    return cache.keys.dtype in HALVES and all(
        each.shape[3] in FEATURES for each in (cache.keys, cache.values)
    )


def _resize(cache: Any, end: int, places: int) -> None:
    """Gives a cache so many places, of which those from an end on are zeros."""
    widths = [(0, 0), (0, 0), (0, places - end), (0, 0)]
    cache.keys = mx.pad(cache.keys[:, :, :end], widths)
    cache.values = mx.pad(cache.values[:, :, :end], widths)


def append(cache: Any, keys: mx.array, values: mx.array) -> None:
    """Does what `update_and_fetch` does, and lets all places of a cache be read.

    Args:
        cache: A `BatchKVCache`.
        keys: Of new tokens, [streams, heads, tokens, features].
        values: Likewise.
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
    """Returns what a token's streams move on.

    A number would lie where the host writes, which the GPU takes 23 us to read in each
    layer (measured, docs/lab), as do arrays of one stream and of two.
    """
    return mx.array([tokens] * streams, dtype)


_cleared: WeakKeyDictionary[BatchKVCache, ref[mx.array]] = WeakKeyDictionary()
"""The keys of each cache whose empty places are zeros, or tokens that were trimmed:
mlx-lm replaces them where streams join, leave or have been padded on the right, and
where a cache grows."""


def _clear(cache: Any) -> None:
    """Makes the empty places of a cache zeros, and aligns their number.

    What padding left there may be no number, and nothing times that is none either.
    """
    end, places = cache._idx, cache.keys.shape[2]
    _resize(cache, end, -(-places // ALIGNED) * ALIGNED)
    _cleared[cache] = ref(cache.keys)


def _write(cache: Any, start: int, keys: mx.array, values: mx.array) -> bool:
    """Writes keys and values from a place on, if the cache has room; says whether.

    MLX takes longer to read the index of mlx-lm, `[..., start:end, :]`.
    """
    end = start + keys.shape[2]
    if cache.keys is None or end > cache.keys.shape[2]:
        return False
    cache.keys[:, :, start:end] = keys
    cache.values[:, :, start:end] = values
    return True
