"""Norms and rope of the heads of q and k, as one kernel."""

from functools import partial

import mlx.core as mx

from mlx_marlin import guard
from mlx_marlin.backends.blocks import launch
from mlx_marlin.backends.blocks.launch import Heads
from mlx_marlin.products.autodiff import differentiable
from mlx_marlin.products.blocks.support import has_kernels

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

    Args:
        heads: The heads.
        qkv: The joined product of q, k and v [streams, tokens, columns].
        positions: Positions of the first tokens, int32 [streams] or a single one.
        freqs: As `freqs` of `mx.fast.rope`, float32 [features / 2].
        norms: Weights [features] of the norms of q and k, if heads are normalized.

    Returns:
        q and k, each [streams, heads, tokens, features]; None if the back end has no
        kernel for them.
    """
    if not has_kernels(qkv) or not _fit(heads, qkv, positions, norms):
        return None
    per_stream = positions.size > 1
    if guard.rotation_fault(heads, qkv.dtype, qkv.shape[1], per_stream):
        return None

    def kernel(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        qkv, positions, freqs, *norms = arrays
        return launch.rotate_heads(heads, qkv, positions, freqs, norms)

    call = differentiable(kernel, partial(_by_mlx, heads))  # type: ignore[arg-type]
    q, k = call(qkv, positions, freqs, *norms)
    return q, k


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
    """Does the same as operations of MLX."""
    streams, tokens, _ = qkv.shape
    parts = qkv[..., : heads.rotated_columns].reshape(
        streams, tokens, -1, heads.features
    )
    both = [*mx.split(parts.transpose(0, 2, 1, 3), [heads.heads], axis=1)]
    if heads.norm is not None:
        pairs = zip(both, norms, strict=True)
        both = [mx.fast.rms_norm(own, weight, heads.norm) for own, weight in pairs]
    rope = partial(
        mx.fast.rope,
        dims=heads.features,
        traditional=False,
        base=None,
        scale=1.0,
        offset=positions.reshape(-1) if positions.size > 1 else positions.reshape(()),
        freqs=freqs,
    )
    q, k = (rope(own) * heads.factor for own in both)
    return q, k
