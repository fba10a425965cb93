"""Sum of two arrays and its RMSNorm, as one kernel."""

from functools import partial

import mlx.core as mx

from mlx_marlin import guard
from mlx_marlin.backends import launcher
from mlx_marlin.backends.shared_launches import IN_CONSTANT
from mlx_marlin.planning.block_plans import MOST_NORMED, AddNormPlan
from mlx_marlin.products.autodiff import differentiable
from mlx_marlin.products.blocks.support import has_kernel
from mlx_marlin.weights.dtypes import dtype_name


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
    call = differentiable(launcher.call(plan), partial(_by_mlx, epsilon=epsilon))  # type: ignore[arg-type]
    total, normed = call(x, y, weight)
    return total, normed


def _by_mlx(
    x: mx.array, y: mx.array, weight: mx.array, epsilon: float
) -> tuple[mx.array, mx.array]:
    """Does the same as operations of MLX."""
    total = x + y
    return total, mx.fast.rms_norm(total, weight, epsilon)
