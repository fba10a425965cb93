"""Attention of a traced block over its KV cache.

It is mlx-lm's, except under a mask on CUDA, where MLX has no kernel and multiplies each
query head separately. There, the query heads that share a KV head are rows of one
product.
"""

import sys
from typing import Any
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache

from mlx_marlin.backends import selection
from mlx_marlin.lm.tracing.block_spec import NotTraceableError
from mlx_marlin.lm.tracing.kv_cache import append, updated, updated_alone

ROPES = (
    nn.RoPE,
    rope_utils.Llama3RoPE,
    rope_utils.ProportionalRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
)
"""Classes of rope that accept an array as offset."""


class NoRope(nn.Module):
    """Stands for the rope of an attention that has None."""

    def __call__(self, x: mx.array, offset: Any) -> mx.array:
        """Returns x."""
        return x


def rope_of(attention: nn.Module) -> nn.Module:
    """Returns the rope of an attention."""
    if "rope" not in attention and vars(attention).get("rope", ()) is None:
        return NoRope()  # type: ignore[no-untyped-call]
    rope: nn.Module = attention["rope"]
    # SmolLM3 has layers whose rope is its class `NoPE`.
    smollm3: Any = sys.modules.get("mlx_lm.models.smollm3")
    if type(rope) not in ROPES and type(rope) is not getattr(smollm3, "NoPE", None):
        raise NotTraceableError(f"its rope is a {type(rope).__name__}")
    return rope


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    mask: Any,
    scale: float,
    sinks: mx.array | None = None,
    *,
    transformed: bool = False,
    alone: bool = False,
) -> mx.array:
    """Appends keys and values to a cache, and attends to all tokens in it.

    `queries`: queries of new tokens, [streams, heads, tokens, features].
    `keys`: keys of new tokens, [streams, kv_heads, tokens, features].
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
    """Returns whether query heads that share a KV head are computed together.

    MLX's `sdpa_vector` takes a mask on Metal, but not on CUDA (0.32.4).
    """
    streams, heads, tokens, _ = queries.shape
    return (
        type(cache) is BatchKVCache
        and type(mask) is mx.array
        and mask.dtype == mx.bool_
        and not selection.traits().stock_masks_attention
        and heads > keys.shape[1]
        and mask.shape == (streams, 1, tokens, cache._idx + tokens)
    )


_last_summands: tuple[Any, tuple[object, ...], mx.array] | None = None


def _summands(mask: mx.array, queries: mx.array, keys: mx.array) -> mx.array:
    """Returns a mask as summands of the scores of grouped heads.

    All layers share the mask of a step. Its summands are computed once, and kept as
    long as the mask.

    `mask`: [streams, 1, tokens, length], with a length of at most `capacity`.
    `queries`: [streams, heads, tokens, features].
    `keys`: the whole array of a cache, [streams, kv_heads, capacity, features].
    """
    global _last_summands
    last, key = _last_summands, (queries.shape, keys.shape, keys.dtype)
    if last is not None and last[0]() is mask and last[1] == key:
        return last[2]
    summands = _masking(mask, queries.shape[1], keys)
    _last_summands = ref(mask, _forget), key, summands
    return summands


def _forget(_: Any) -> None:
    """Drops the last summands, when the mask of the current weak reference is freed."""
    global _last_summands
    _last_summands = None


def _masking(mask: mx.array, heads: int, keys: mx.array) -> mx.array:
    streams, _, tokens, length = mask.shape
    kv_heads, capacity = keys.shape[1:3]
    # Half the minimum stays finite after a score of down to -3e4 in float16 is added,
    # and masks scores of up to 3e4 more than the visible ones. A row without a visible
    # token attends to something, as in MLX.
    lowest = mx.array(mx.finfo(keys.dtype).min / 2, keys.dtype)
    visible = mx.pad(mask, [(0, 0), (0, 0), (0, 0), (0, capacity - length)])
    summands = mx.where(visible[:, :, None], mx.array(0, keys.dtype), lowest)
    groups = streams, kv_heads, heads // kv_heads, tokens, capacity
    # Contiguous: each layer's product takes longer with a broadcast array.
    return mx.contiguous(mx.broadcast_to(summands, groups)).reshape(
        streams, kv_heads, -1, capacity
    )


def _grouped(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    summands: mx.array,
    scale: float,
) -> mx.array:
    """Attends to the whole capacity of a cache, including the masked positions.

    The shape of the whole arrays changes every 256 tokens and with the streams. Views
    of the filled part would have another shape at each token.
    """
    streams, heads, tokens, features = queries.shape
    rows = queries.reshape(streams, keys.shape[1], -1, features)
    scores = mx.addmm(summands, rows, keys.swapaxes(2, 3), alpha=scale)
    y = mx.softmax(scores, axis=-1, precise=True) @ values
    return y.reshape(streams, heads, tokens, -1)
