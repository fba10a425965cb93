"""Decides whether rope and the norms of q and k are fused, and into what.

For the next token of each stream they are fused into the product of q, k and v, if the
back end has a kernel for it. That kernel stores the heads in the order in which
attention reads them, which would otherwise take one more kernel and three reshapes.
Other back ends have one kernel for norms and rope, which reads the product
(`heads_of`).
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import Llama3RoPE, YarnRoPE

from mlx_marlin.planning.epilogue import Heads as HeadLayout
from mlx_marlin.planning.epilogue import Rotation

HOST_BYTES = 8
"""MLX keeps arrays of at most this size in host memory (0.32.4), from which each block
of a kernel takes 2 to 10 us to read its position (measured, docs/lab)."""
Heads = tuple[mx.array, mx.array, mx.array]
"""q, k and v, each [streams, heads, 1, features]."""


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
