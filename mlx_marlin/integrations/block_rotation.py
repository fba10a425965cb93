"""Heads of q and k that their product rotates as it stores them.

For a stream's next token, so that its heads lie in memory as attention reads them: what
would take a kernel and three changes of shape more.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_marlin.epilogue import Rotation
from mlx_marlin.nn import MarlinLinear

Heads = tuple[mx.array, mx.array, mx.array]
"""q, k and v, each [streams, heads, 1, features]."""


def rotated_heads(
    layer: MarlinLinear,
    norm: nn.RMSNorm,
    rope: Any,
    sizes: tuple[int, ...],
    features: int,
    x: mx.array,
    offset: mx.array,
) -> Heads | None:
    """Returns q, k and v of streams' next tokens, or None where kernels do it not all.

    Args:
        layer: Their product.
        norm: What comes before it.
        rope: What rotates q and k.
        sizes: Features of q, k and v.
        features: Those of a head.
        x: What goes into the norm, [streams, 1, k].
        offset: Place of all tokens or of each, [1] or [streams].
    """
    periods = periods_of(rope, features)
    if periods is None or x.shape[1] != 1 or offset.dtype != mx.int32:
        return None
    rotation = Rotation(features, sum(sizes[:2]), each=offset.size > 1)
    if x.shape[0] > 1:
        heads: Heads | None = layer.rotated(x, norm, rotation, sizes, offset, periods)
        return heads
    joined = layer.rotated(x, norm, rotation, (), offset, periods)
    if joined is None:
        return None
    q, k, v = mx.split(joined, [sizes[0] // features, sum(sizes[:2]) // features], 1)
    return q, k, v


def periods_of(rope: Any, features: int) -> mx.array | None:
    """Returns tokens per radian of each pair of a head's features, float32.

    Of ropes that turn whole heads by halves and do nothing else; None of others.
    """
    if type(rope) not in (nn.RoPE, Llama3RoPE):
        return None
    if rope.traditional or rope.dims != features:
        return None
    if type(rope) is Llama3RoPE:
        periods: mx.array = rope._freqs
        return periods if periods.dtype == mx.float32 else None
    powers = np.arange(0, features, 2) / features
    return mx.array((rope.base**powers / rope.scale).astype(np.float32))
