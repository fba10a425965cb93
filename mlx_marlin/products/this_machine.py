"""The device of this process, and why no kernel of ours runs on it."""

import os

import mlx.core as mx

from mlx_marlin.backends import devices, selection
from mlx_marlin.planning.block_plans import AddNormPlan, HeadsPlan
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.weights.formats import DTYPE_BYTES


def device() -> PlanningDevice:
    """Returns the device to plan for, which is one of the back end in use."""
    backend = selection.active()
    here: PlanningDevice = devices.current(backend.name)
    if here.backend == backend.name:
        return here
    wish = os.environ.get(devices.ENVIRONMENT)
    if wish:
        raise ValueError(
            f"{devices.ENVIRONMENT}={wish!r}: expected {backend.traits.device_noun}, "
            f"because our kernels run on {selection.backend()}"
        )
    default: PlanningDevice = backend.traits.default_device
    return default


def why_not(on_cpu: bool) -> str | None:
    """Returns why no kernel can run in this process, or None."""
    if selection.backend() == "stock":
        return "no back end here runs our kernels, or MLX_MARLIN_BACKEND says stock"
    if on_cpu and selection.may_hand_over():
        return "the call runs on the CPU"
    return None


def has_kernel(plan: HeadsPlan | AddNormPlan, x: mx.array) -> bool:
    """Returns whether a kernel of a decoder block runs here with its activations."""
    if type(plan) not in selection.traits().launches or plan.dtype not in DTYPE_BYTES:
        return False
    if x.size == 0 or device().unsupported is not None:
        return False
    return why_not(mx.default_device() == mx.Device(mx.cpu)) is None
