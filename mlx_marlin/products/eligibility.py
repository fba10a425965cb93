"""Reasons why stock MLX serves a call.

`why_not` returns them to the user.
"""

import os
from math import prod

from mlx_marlin.backends import devices, selection
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.problem import MOST_ELEMENTS, largest_array
from mlx_marlin.products.experts.request import GatherRequest
from mlx_marlin.products.request import MatmulRequest
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES, FORMATS

NOTHING = "there is nothing to add up"
"""Why no kernel runs if x or the result is empty."""


def not_here(on_cpu: bool) -> str | None:
    """Returns why no kernel can run in this process, or None."""
    backend = selection.backend()
    if backend == "stock":
        return "no back end here runs our kernels, or MLX_MARLIN_BACKEND says stock"
    if on_cpu and selection.may_hand_over():
        return "the call runs on the CPU"
    return None


def not_ours(request: MatmulRequest | GatherRequest) -> str | None:
    """Returns what part of a request no kernel computes, or None."""
    if isinstance(request, GatherRequest):
        return _not_ours_of_experts(request)
    if not request.transpose and request.layout == "mlx":
        return "our kernels multiply by the transposed weight only"
    known = FORMATS.get((request.mode, request.bits))
    packed = request.layout == "marlin"  # its format has been checked
    if known is None or not (packed or request.group_size in known.group_sizes):
        return (
            f"{request.mode} {request.bits}-bit with group size {request.group_size} "
            f"is not one of our formats"
        )
    if request.k % known.k_multiple(request.group_size):
        return f"our kernels take {request.mode} with a k that is a multiple of " + (
            f"{known.k_multiple(request.group_size)}, and k={request.k}"
        )
    if dtype_name(request.dtype) not in DTYPE_BYTES:
        return f"our kernels do not compute in {dtype_name(request.dtype)}"
    batch, m, n = request.sizes
    of_rows = request.norm is not None or request.epilogue.rotation is not None
    if of_rows and len(request.x_shape) == 1:
        return "our kernels normalize and rotate rows of a matrix"
    if largest_array(m, n, request.k, request.bits, batch) >= MOST_ELEMENTS:
        return "our kernels count in 32 bits, and an array is too large for that"
    return None


def _not_ours_of_experts(request: GatherRequest) -> str | None:
    known = FORMATS.get((request.mode, request.bits))
    if known is None:
        return f"{request.mode} {request.bits}-bit is not one of our formats"
    wrong = known.why_not(request.group_size, request.k, request.layout)
    if wrong is not None or request.has_global_scale:
        return wrong or "our kernels for experts take no global scale"
    if not request.transpose or len(request.x_shape) < 2 or request.x_shape[-2] != 1:
        return "our kernels for experts take single rows times transposed weights"
    if dtype_name(request.dtype) not in DTYPE_BYTES:
        return f"our kernels do not compute in {dtype_name(request.dtype)}"
    if (
        not prod(request.pairs)
        or not prod(request.x_shape)
        or not request.experts * request.n
    ):
        return NOTHING
    rows = max(prod(request.pairs), prod(request.x_shape[:-1]))
    columns = request.n * (2 if request.gate else 1)
    if largest_array(rows, columns, request.k, request.bits) >= MOST_ELEMENTS:
        return "our kernels count in 32 bits, and an array is too large for that"
    return None


def unsupported_device() -> str | None:
    """Returns why no kernel runs on this device, or None."""
    return target().unsupported


def refuse_variance(invariant: bool, reason: str) -> None:
    """Raises a ValueError if stock MLX would serve an invariant product."""
    if invariant:
        raise ValueError(
            f"invariant=True cannot be kept, because stock MLX would serve the call: "
            f"{reason}"
        )


def target() -> PlanningDevice:
    """Returns the device to plan for, which is one of the back end in use.

    Raises:
        ValueError: If MLX_MARLIN_DEVICE names a device of another back end.
    """
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
