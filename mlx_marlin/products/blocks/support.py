"""Whether a kernel of a decoder block runs here."""

import mlx.core as mx

from mlx_marlin.backends import selection
from mlx_marlin.planning.block_plans import AddNormPlan, HeadsPlan
from mlx_marlin.products import eligibility
from mlx_marlin.weights.formats import DTYPE_BYTES


def has_kernel(plan: HeadsPlan | AddNormPlan, x: mx.array) -> bool:
    """Returns whether the back end has a kernel for a plan and its activations."""
    if type(plan) not in selection.traits().launches or plan.dtype not in DTYPE_BYTES:
        return False
    if x.size == 0 or eligibility.unsupported_device() is not None:
        return False
    return eligibility.not_here(mx.default_device() == mx.Device(mx.cpu)) is None
