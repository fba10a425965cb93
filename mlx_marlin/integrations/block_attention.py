"""Attention of a traced block, and the cache that it writes and reads.

Both are mlx-lm's, but where MLX takes longer than it needs to: to read an index that
mlx-lm writes as `[..., start:end, :]`, and on CUDA to attend under a mask. It has no
kernel for that, and multiplies each head of q for itself; heads that share keys can be
rows of one product.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_marlin import backends


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    mask: Any,
    scale: float,
) -> mx.array:
    """Adds keys and values to a cache, and attends to all that it has.

    Args:
        queries: Of new tokens, [streams, heads, tokens, features].
        keys: Likewise, of as many heads or fewer.
        values: Likewise.
        cache: Any of mlx-lm's.
        mask: As mlx-lm makes it for this cache: an array, a word or None.
        scale: Factor of q times k.

    Returns:
        What the tokens found, [streams, heads, tokens, features].
    """
    if _is_grouped(queries, keys, cache, mask):
        _append(cache, keys, values)
        summands = _summands(mask, queries, cache.keys)
        return _grouped(queries, cache.keys, cache.values, summands, scale)
    keys, values = _updated(cache, keys, values)
    y: mx.array = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask
    )
    return y


def _is_grouped(queries: mx.array, keys: mx.array, cache: Any, mask: Any) -> bool:
    """Returns whether heads that share keys attend together, under a mask.

    MLX's `sdpa_vector` takes no mask on CUDA (0.32.4). On Metal it does.
    """
    return (
        type(cache) is BatchKVCache
        and type(mask) is mx.array
        and mask.dtype == mx.bool_
        and backends.backend() == "cuda"
        and queries.shape[1] > keys.shape[1]
        and mask.shape == _shape_of_mask(queries, cache)
    )


def _shape_of_mask(queries: mx.array, cache: Any) -> tuple[int, ...]:
    streams, _, tokens, _ = queries.shape
    return streams, 1, tokens, cache._idx + tokens


def _append(cache: Any, keys: mx.array, values: mx.array) -> None:
    """Does what `update_and_fetch` does, but for taking apart what it has."""
    if not _write(cache, cache._idx, keys, values):
        cache.update_and_fetch(keys, values)
        return
    cache._idx += keys.shape[2]
    cache.offset = cache.offset + keys.shape[2]


def _updated(cache: Any, keys: mx.array, values: mx.array) -> Any:
    """Does what `cache.update_and_fetch` does."""
    is_plain: bool = type(cache) is KVCache
    if not is_plain or not _write(cache, cache.offset, keys, values):
        return cache.update_and_fetch(keys, values)
    cache.offset = end = cache.offset + keys.shape[2]
    return cache.keys[:, :, :end], cache.values[:, :, :end]


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


_last_summands: tuple[mx.array | None, tuple[object, ...], mx.array]
_last_summands = None, (), mx.array(0)


def _summands(mask: mx.array, queries: mx.array, keys: mx.array) -> mx.array:
    """Returns what a mask adds to the scores of grouped heads.

    All layers of a token share a mask, for which it is made once.

    Args:
        mask: [streams, 1, tokens, length], length at most the places of keys.
        queries: [streams, heads, tokens, features].
        keys: All places of a cache, [streams, kv_heads, places, features].
    """
    global _last_summands
    known, kind, summands = _last_summands
    asked = queries.shape, keys.shape, keys.dtype
    if known is not mask or kind != asked:
        summands = _masking(mask, queries.shape[1], keys)
        _last_summands = mask, asked, summands
    return summands


def _masking(mask: mx.array, heads: int, keys: mx.array) -> mx.array:
    streams, _, tokens, length = mask.shape
    kv_heads, places = keys.shape[1:3]
    # Finite with any score: a token that may see nothing finds something, as in MLX.
    least = mx.array(mx.finfo(keys.dtype).min / 2, keys.dtype)
    seen = mx.pad(mask, [(0, 0), (0, 0), (0, 0), (0, places - length)])
    summands = mx.where(seen[:, :, None], mx.array(0, keys.dtype), least)
    groups = streams, kv_heads, heads // kv_heads, tokens, places
    # An array of its own: the product would copy a broadcast one in each layer.
    return mx.contiguous(mx.broadcast_to(summands, groups)).reshape(
        streams, kv_heads, -1, places
    )


def _grouped(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    summands: mx.array,
    scale: float,
) -> mx.array:
    """Attends to all places of a cache, those that are empty or of other streams too.

    Whole, because products of aligned rows are faster, and a cache's length changes
    every 256 tokens only.
    """
    streams, heads, tokens, features = queries.shape
    rows = queries.reshape(streams, keys.shape[1], -1, features)
    scores = mx.addmm(summands, rows, keys.swapaxes(2, 3), alpha=scale)
    found = mx.softmax(scores, axis=-1, precise=True) @ values
    return found.reshape(streams, heads, tokens, -1)
