"""Attention of a traced block, to what its cache has.

It is mlx-lm's, but where MLX takes longer than it needs to: on CUDA under a mask. MLX
has no kernel for that, and multiplies each head of q for itself; heads that share keys
can be rows of one product.
"""

from typing import Any
from weakref import ref

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache

from mlx_marlin.backends import selection
from mlx_marlin.integrations.tracing.kv_cache import append, updated, updated_alone


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    mask: Any,
    scale: float,
    sinks: mx.array | None = None,
    transformed: bool = False,
    alone: bool = False,
) -> mx.array:
    """Adds keys and values to a cache, and attends to all that it has.

    Args:
        queries: Of new tokens, [streams, heads, tokens, features].
        keys: Likewise, of as many heads or fewer.
        values: Likewise.
        cache: Any of mlx-lm's.
        mask: As mlx-lm makes it for this cache: an array, a word or None. It must not
            be changed in place.
        scale: Factor of q times k.
        sinks: A score of nothing for each head, if there are: as in MLX.
        transformed: Whether MLX may be differentiating: then attention is its own. (In
            0.32.4 the tangent of `addmm` lacks the factor. So it does here where only
            what the cache had before is differentiated, forwards.)
        alone: Whether the tokens are one stream's, alone in its batch (`is_alone`).

    Returns:
        What the tokens found, [streams, heads, tokens, features].
    """
    if alone:
        keys, values = updated_alone(cache, keys, values)
        mask = None
    elif not transformed and sinks is None and _is_grouped(queries, keys, cache, mask):
        append(cache, keys, values)
        summands = _summands(mask, queries, cache.keys)
        return _grouped(queries, cache.keys, cache.values, summands, scale)
    else:
        keys, values = updated(cache, keys, values)
    y: mx.array = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
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
        and selection.backend() == "cuda"
        and queries.shape[1] > keys.shape[1]
        and mask.shape == _shape_of_mask(queries, cache)
    )


def _shape_of_mask(queries: mx.array, cache: Any) -> tuple[int, ...]:
    streams, _, tokens, _ = queries.shape
    return streams, 1, tokens, cache._idx + tokens


_last_summands: tuple[Any, tuple[object, ...], mx.array] | None = None


def _summands(mask: mx.array, queries: mx.array, keys: mx.array) -> mx.array:
    """Returns what a mask adds to the scores of grouped heads.

    All layers of a token share a mask, for which it is made once, and kept as long as
    the mask is.

    Args:
        mask: [streams, 1, tokens, length], length at most the places of keys.
        queries: [streams, heads, tokens, features].
        keys: All places of a cache, [streams, kv_heads, places, features].
    """
    global _last_summands
    last, asked = _last_summands, (queries.shape, keys.shape, keys.dtype)
    if last is not None and last[0]() is mask and last[1] == asked:
        return last[2]
    summands = _masking(mask, queries.shape[1], keys)
    _last_summands = ref(mask, _forget), asked, summands
    return summands


def _forget(_: Any) -> None:
    """Lets go of what the last mask adds; a reference that was replaced is silent."""
    global _last_summands
    _last_summands = None


def _masking(mask: mx.array, heads: int, keys: mx.array) -> mx.array:
    streams, _, tokens, length = mask.shape
    kv_heads, places = keys.shape[1:3]
    # Half of it is finite with scores down to -3e4 in float16, and masks any that are
    # 3e4 above those that count. Who may see nothing finds something, as in MLX.
    least = mx.array(mx.finfo(keys.dtype).min / 2, keys.dtype)
    seen = mx.pad(mask, [(0, 0), (0, 0), (0, 0), (0, places - length)])
    summands = mx.where(seen[:, :, None], mx.array(0, keys.dtype), least)
    groups = streams, kv_heads, heads // kv_heads, tokens, places
    # An array of its own: each layer's product takes longer with a broadcast one.
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
    """Attends to all places of a cache, also those that the mask hides.

    They are whole arrays, whose shape changes every 256 tokens and with the streams;
    those of what has been filled would be views of another shape for each token.
    """
    streams, heads, tokens, features = queries.shape
    rows = queries.reshape(streams, keys.shape[1], -1, features)
    scores = mx.addmm(summands, rows, keys.swapaxes(2, 3), alpha=scale)
    found = mx.softmax(scores, axis=-1, precise=True) @ values
    return found.reshape(streams, heads, tokens, -1)
