"""Heads of q and k that their product normalizes and rotates as it stores them.

For a stream's next token, so that its heads lie in memory as attention reads them: what
would take a kernel and three changes of shape more.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import Llama3RoPE, YarnRoPE

from mlx_marlin.planning.epilogue import Rotation

HOST_BYTES = 8
"""MLX keeps arrays of up to so many bytes where the host writes too (0.32.4): that each
block of a product read its place there took 2 to 10 us (measured, docs/lab)."""
Heads = tuple[mx.array, mx.array, mx.array]
"""q, k and v, each [streams, heads, 1, features]."""


def rotated_heads(
    modules: dict[str, Any],
    sizes: tuple[int, ...],
    features: int,
    x: mx.array,
    places: mx.array,
    each: bool,
) -> Heads | None:
    """Returns q, k and v of streams' next tokens; None where kernels do not all of it.

    Args:
        modules: The product of all three as "joined", the "norm" before, the "rope",
            and "q_norm" and "k_norm" if heads have norms.
        sizes: Features of q, k and v.
        features: Those of a head.
        x: What goes into the norm, [streams, 1, k].
        places: Those of the tokens.
        each: Whether each stream has its own place; else the first is all streams'.
    """
    layer, norm = modules["joined"], modules["norm"]
    if x.shape[1] != 1 or any(size % features for size in sizes):
        return None
    if places.dtype != mx.int32 or places.nbytes <= HOST_BYTES:
        return None
    if each and places.shape != x.shape[:1]:
        return None  # MLX's rope says what is wrong
    rope = modules["rope"]
    periods = periods_of(rope, features)
    if periods is None:
        return None
    columns = sum(sizes[:2])
    rotation = Rotation(features, columns, each=each, factor=factor_of(rope))
    norms = [modules[name] for name in ("q_norm", "k_norm") if name in modules]
    if norms:
        if any(not _is_of_heads(each, features) for each in norms):
            return None
        if len({each.eps for each in norms}) > 1:
            return None
        rotation = replace(rotation, norm=float(norms[0].eps), queries=sizes[0])
    given = places, periods, tuple(each["weight"] for each in norms)
    if x.shape[0] > 1:
        heads: Heads | None = layer.rotated(x, norm, rotation, sizes, *given)
        return heads
    joined = layer.rotated(x, norm, rotation, (), *given)
    if joined is None:
        return None
    q, k, v = mx.split(joined, [sizes[0] // features, columns // features], 1)
    return q, k, v


def _is_of_heads(norm: Any, features: int) -> bool:
    """Returns whether a norm is MLX's, and of each head for itself."""
    return type(norm) is nn.RMSNorm and norm["weight"].shape == (features,)


def on_device(offset: mx.array) -> mx.array:
    """Returns places that are all an offset, in the device's own memory."""
    return offset + mx.zeros(1 + HOST_BYTES // 4, mx.int32)


def periods_of(rope: Any, features: int) -> mx.array | None:
    """Returns the places that make a radian of each pair of a head's features, float32.

    Of ropes that turn whole heads by halves, and at most multiply them by a number;
    None of others.
    """
    if type(rope) not in (nn.RoPE, Llama3RoPE, YarnRoPE):
        return None
    if rope.traditional or rope.dims != features or factor_of(rope) <= 0:
        return None
    if type(rope) is not nn.RoPE:
        periods: mx.array = rope._freqs
        return periods if periods.dtype == mx.float32 else None
    powers = np.arange(0, features, 2) / features
    return mx.array((rope.base**powers / rope.scale).astype(np.float32))


def factor_of(rope: Any) -> float:
    """Returns what a rope multiplies heads by."""
    return float(rope.mscale) if type(rope) is YarnRoPE else 1.0
