"""Attention in traced blocks; one kernel normalizes and rotates its heads."""

import sys
from dataclasses import replace
from typing import Any
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import rope_utils
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache, KVCache
from mlx_lm.models.rope_utils import Llama3RoPE, YarnRoPE

from mlx_marlin.backends import selection
from mlx_marlin.lm.tracing.block_spec import NotTraceableError
from mlx_marlin.lm.tracing.kv_cache import append, update_whole, updated, updated_alone
from mlx_marlin.planning.epilogue import Heads as HeadLayout
from mlx_marlin.planning.epilogue import Rotation

HOST_BYTES = 8
"""MLX keeps arrays of at most this size in host memory (0.32.4), from which each block
of a kernel takes 2 to 10 us to read its position (measured, docs/lab)."""
FEW_ROWS = 32
"""Most rows of a pass that attend to the whole capacity of a cache."""
Heads = tuple[mx.array, mx.array, mx.array]
"""q, k and v, each [streams, heads, 1, features]."""
ROPES = (
    nn.RoPE,
    rope_utils.Llama3RoPE,
    rope_utils.ProportionalRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
)
"""Classes of rope that accept an array as offset."""


def rotated_heads(
    modules: dict[str, Any],
    sizes: tuple[int, ...],
    features: int,
    x: mx.array,
    positions: mx.array,
    per_stream: bool,
) -> Heads | None:
    """Returns q, k and v of each stream's next token, or None if not fused.

    `x`: input of the norm, [streams, 1, k].
    """
    layer, norm, rope = modules["joined"], modules["norm"], modules["rope"]
    if x.shape[1] != 1 or any(size % features for size in sizes):
        return None
    if positions.dtype != mx.int32 or positions.nbytes <= HOST_BYTES:
        return None
    if per_stream and positions.shape != x.shape[:1]:
        return None  # MLX's rope raises
    freqs, norms = freqs_of(rope, features), _head_norms(modules, features)
    if freqs is None or norms is None:
        return None
    columns = sum(sizes[:2])
    rotation = Rotation(features, columns, per_row=per_stream, factor=factor_of(rope))
    if norms:
        rotation = replace(rotation, norm=float(norms[0].eps), queries=sizes[0])
    operands = positions, freqs, tuple(head_norm["weight"] for head_norm in norms)
    if x.shape[0] > 1:
        heads: Heads | None = layer.rotated(x, norm, rotation, sizes, *operands)
        return heads
    joined = layer.rotated(x, norm, rotation, (), *operands)
    if joined is None:
        return None
    q, k, v = mx.split(joined, [sizes[0] // features, columns // features], 1)
    return q, k, v


def heads_of(
    modules: dict[str, Any], heads: int, kv_heads: int, columns: int
) -> tuple[HeadLayout, mx.array, tuple[mx.array, ...]] | None:
    """Returns what a kernel needs to normalize and rotate the heads of q and k."""
    rope, features = modules["rope"], columns // (heads + 2 * kv_heads)
    freqs, norms = freqs_of(rope, features), _head_norms(modules, features)
    if freqs is None or norms is None:
        return None
    layout = HeadLayout(
        heads=heads,
        kv_heads=kv_heads,
        features=features,
        columns=columns,
        norm=float(norms[0].eps) if norms else None,
        factor=factor_of(rope),
    )
    return layout, freqs, tuple(norm["weight"] for norm in norms)


def _head_norms(modules: dict[str, Any], features: int) -> list[Any] | None:
    """Returns the norms of q and k, if any; None if kernels do not compute them.

    They have to be MLX's, of single heads, and with one epsilon.
    """
    norms = [modules[name] for name in ("q_norm", "k_norm") if name in modules]
    known = all(
        type(norm) is nn.RMSNorm and norm["weight"].shape == (features,)
        for norm in norms
    )
    return norms if known and len({norm.eps for norm in norms}) <= 1 else None


def on_device(offset: mx.array) -> mx.array:
    """Returns positions in device memory that all equal an offset."""
    return offset + mx.zeros(1 + HOST_BYTES // 4, mx.int32)


def freqs_of(rope: Any, features: int) -> mx.array | None:
    """Returns the frequencies of a rope, as `freqs` of `mx.fast.rope`, in float32.

    Returns None for a rope that the kernels do not compute: they rotate whole heads,
    without `traditional`, and multiply the result by at most one factor.
    """
    if type(rope) not in (nn.RoPE, Llama3RoPE, YarnRoPE):
        return None
    if rope.traditional or rope.dims != features or factor_of(rope) <= 0:
        return None
    if type(rope) is not nn.RoPE:
        freqs: mx.array = rope._freqs
        return freqs if freqs.dtype == mx.float32 else None
    powers = np.arange(0, features, 2) / features
    return mx.array((rope.base**powers / rope.scale).astype(np.float32))


def factor_of(rope: Any) -> float:
    """Returns the factor by which a rope multiplies heads."""
    return float(rope.mscale) if type(rope) is YarnRoPE else 1.0


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
    elif not transformed and sinks is None and _are_few_rows(queries, cache, mask):
        update_whole(cache, keys, values)
        summands = _causal(queries, cache.keys, cache.offset)
        return _grouped(queries, cache.keys, cache.values, summands, scale)
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


def _are_few_rows(queries: mx.array, cache: Any, mask: Any) -> bool:
    """Returns whether the rows of a pass attend to the whole capacity of a cache.

    On CUDA, MLX (0.32.4) lets cuDNN plan each number of rows with each length anew,
    which takes 50 to 70 ms (measured). Passes that verify drafts have few rows.
    """
    return (
        type(cache) is KVCache
        and isinstance(mask, str)
        and mask == "causal"
        and 1 < queries.shape[2] <= FEW_ROWS
        and selection.traits().stock_attends_by_capacity
    )


_last_causal: tuple[tuple[object, ...], mx.array] | None = None


def _causal(queries: mx.array, keys: mx.array, end: int) -> mx.array:
    """Returns the summands of rows that see the tokens up to their own.

    All layers share those of a pass.

    `end`: tokens in the cache with those of the rows, which are the last.
    """
    global _last_causal
    last, key = _last_causal, (queries.shape, keys.shape, keys.dtype, end)
    if last is not None and last[0] == key:
        return last[1]
    streams, heads, tokens, _ = queries.shape
    seen = mx.arange(end - tokens + 1, end + 1)[:, None] > mx.arange(end)
    mask = mx.broadcast_to(seen, (streams, 1, tokens, end))
    summands = _masking(mask, heads, keys)
    _last_causal = key, summands
    return summands


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
