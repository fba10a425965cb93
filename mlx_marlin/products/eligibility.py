"""Reasons why stock MLX serves a call.

`why_not` returns them to the user.
"""

import os

from mlx_marlin.backends import devices, selection
from mlx_marlin.planning.device import PlanningDevice


def not_here(on_cpu: bool) -> str | None:
    """Returns why no kernel can run in this process, or None."""
    if selection.backend() == "stock":
        return "no back end here runs our kernels, or MLX_MARLIN_BACKEND says stock"
    if on_cpu and selection.may_hand_over():
        return "the call runs on the CPU"
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
