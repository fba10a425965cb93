"""Kernels of decoder blocks that are no products of weights.

They are the norms and rope of the heads of q and k, and a sum with its RMSNorm.
"""

from functools import partial

import mlx.core as mx

from mlx_marlin import guard
from mlx_marlin.backends import graph
from mlx_marlin.backends.build import IN_CONSTANT
from mlx_marlin.planning.block_plans import MOST_NORMED, AddNormPlan, HeadsPlan
from mlx_marlin.planning.epilogue import Heads
from mlx_marlin.products.autodiff import differentiable
from mlx_marlin.products.reference import epilogue
from mlx_marlin.products.reference.epilogue import check_frequencies
from mlx_marlin.products.this_machine import has_kernel
from mlx_marlin.weights.dtypes import dtype_name

MIN_FEATURES, MAX_FEATURES = 16, 512
"""Features of a head. MLX passes fewer than 8 frequencies in the `constant` address
space; a lane keeps every 32nd pair of a head in registers."""


def rotated(
    heads: Heads,
    qkv: mx.array,
    positions: mx.array,
    freqs: mx.array,
    norms: tuple[mx.array, ...],
) -> tuple[mx.array, mx.array] | None:
    """Returns the normalized and rotated heads of q and k, rounded once.

    `qkv`: the joined product of q, k and v [streams, tokens, columns].
    `positions`: positions of the first tokens, int32 [streams] or a single one.
    `norms`: weights [features] of the norms of q and k, if heads are normalized.
    """
    _check(heads, qkv, freqs, norms)
    streams, tokens, _ = qkv.shape
    per_stream = positions.size > 1
    plan = HeadsPlan(heads, dtype_name(qkv.dtype), streams, tokens, per_stream)
    if not has_kernel(plan, qkv) or not _fit(heads, qkv, positions, norms):
        return None
    if guard.remembered_fault(plan):
        return None
    stock = partial(_heads_by_mlx, heads)
    call = differentiable(graph.call(plan), stock)  # type: ignore[arg-type]
    q, k = call(qkv, positions.reshape(-1), freqs, *norms)
    return q, k


def _check(
    heads: Heads, qkv: mx.array, freqs: mx.array, norms: tuple[mx.array, ...]
) -> None:
    if qkv.ndim != 3 or qkv.shape[-1] != heads.columns:
        raise ValueError(
            f"qkv has shape {qkv.shape}, expected [streams, tokens, {heads.columns}]"
        )
    check_frequencies(heads.rotation, freqs, norms)


def _fit(
    heads: Heads, qkv: mx.array, positions: mx.array, norms: tuple[mx.array, ...]
) -> bool:
    """Returns whether the kernel can read these arrays."""
    return (
        heads.features % 2 == 0
        and MIN_FEATURES <= heads.features <= MAX_FEATURES
        and positions.dtype == mx.int32
        and positions.size in (1, qkv.shape[0])
        and all(weight.dtype == qkv.dtype for weight in norms)
    )


def _heads_by_mlx(
    heads: Heads,
    qkv: mx.array,
    positions: mx.array,
    freqs: mx.array,
    *norms: mx.array,
) -> tuple[mx.array, mx.array]:
    """Does the same as operations of MLX that have derivatives."""
    streams, tokens, _ = qkv.shape
    rows = qkv[..., : heads.rotated_columns].reshape(streams * tokens, -1)
    first = mx.broadcast_to(positions.reshape(-1, 1), (streams, 1))
    own = (first + mx.arange(tokens)).flatten()
    turned = epilogue.rotated(rows, heads.rotation, (), own, freqs, *norms)
    turned = turned.reshape(streams, tokens, -1, heads.features)
    q, k = mx.split(turned.transpose(0, 2, 1, 3), [heads.heads], axis=1)
    return q, k


def added_and_normed(
    x: mx.array, y: mx.array, weight: mx.array, epsilon: float
) -> tuple[mx.array, mx.array] | None:
    """Returns x + y, and the RMSNorm of this sum.

    The sum is rounded as by MLX. The norm is rounded once, by MLX twice.

    `x`: summands [..., n].
    `weight`: weight [n] of the norm, in the dtype of x.
    """
    if not x.size or not x.ndim or x.shape != y.shape:
        return None
    n, dtype = x.shape[-1], x.dtype
    if not IN_CONSTANT <= n <= MOST_NORMED or weight.shape != (n,):
        return None
    plan = AddNormPlan(x.size // n, dtype_name(dtype), n, epsilon)
    if {y.dtype, weight.dtype} != {dtype} or not has_kernel(plan, x):
        return None
    if guard.remembered_fault(plan):
        return None
    stock = partial(_sum_by_mlx, epsilon=epsilon)
    call = differentiable(graph.call(plan), stock)  # type: ignore[arg-type]
    total, normed = call(x, y, weight)
    return total, normed


def _sum_by_mlx(
    x: mx.array, y: mx.array, weight: mx.array, epsilon: float
) -> tuple[mx.array, mx.array]:
    """Does the same as operations of MLX."""
    total = x + y
    return total, mx.fast.rms_norm(total, weight, epsilon)
