"""Sum of two arrays and its RMSNorm, as one kernel."""

from functools import partial

import mlx.core as mx

from mlx_marlin import guard
from mlx_marlin.backends.blocks import launch
from mlx_marlin.backends.kernels import IN_CONSTANT
from mlx_marlin.planning.launches import most_normed
from mlx_marlin.products.autodiff import differentiable
from mlx_marlin.products.blocks.support import has_kernels


def added_and_normed(
    x: mx.array, y: mx.array, weight: mx.array, epsilon: float
) -> tuple[mx.array, mx.array] | None:
    """Returns x + y, and the RMSNorm of this sum.

    The sum is rounded as by MLX. The norm is rounded once, by MLX twice.

    Args:
        x: Summands [..., n].
        y: Summands of the shape and dtype of x.
        weight: Weight [n] of the norm, in the dtype of x.
        epsilon: Epsilon of the norm.

    Returns:
        The sum and its norm; None if the back end has no kernel for them.
    """
    if not x.ndim or not has_kernels(x) or x.shape != y.shape:
        return None
    n, dtype = x.shape[-1], x.dtype
    if not IN_CONSTANT <= n <= most_normed() or weight.shape != (n,):
        return None
    if {y.dtype, weight.dtype} != {dtype}:
        return None
    if guard.add_norm_fault(dtype, n, epsilon):
        return None
    kernel = partial(launch.add_norm, epsilon=epsilon)
    call = differentiable(kernel, partial(_by_mlx, epsilon=epsilon))  # type: ignore[arg-type]
    total, normed = call(x, y, weight)
    return total, normed


def _by_mlx(
    x: mx.array, y: mx.array, weight: mx.array, epsilon: float
) -> tuple[mx.array, mx.array]:
    """Does the same as operations of MLX."""
    total = x + y
    return total, mx.fast.rms_norm(total, weight, epsilon)
