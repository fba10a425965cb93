"""Norms and rope of the heads of q and k, as one kernel."""

from functools import partial

import mlx.core as mx

from mlx_marlin import guard
from mlx_marlin.backends import launcher
from mlx_marlin.planning.block_plans import HeadsPlan
from mlx_marlin.planning.epilogue import Heads
from mlx_marlin.products.autodiff import differentiable
from mlx_marlin.products.blocks.support import has_kernel
from mlx_marlin.products.reference import epilogue
from mlx_marlin.products.reference.epilogue import check_frequencies
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
    call = differentiable(launcher.call(plan), partial(_by_mlx, heads))  # type: ignore[arg-type]
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


def _by_mlx(
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
