"""The back ends, and which of them a device or a plan belongs to."""

from mlx_marlin.backends.base import Backend
from mlx_marlin.backends.cuda.backend import CudaBackend
from mlx_marlin.backends.metal.backend import MetalBackend
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.plan import Plan

BACKENDS: list[Backend] = [MetalBackend(), CudaBackend()]


def of_device(device: PlanningDevice) -> Backend:
    """Returns the back end that plans for a device."""
    return next(each for each in BACKENDS if isinstance(device, each.device_type))


def of_plan(plan: Plan) -> Backend:
    """Returns the back end that runs a plan."""
    return next(each for each in BACKENDS if isinstance(plan, each.plan_type))


def kernels() -> tuple[str, ...]:
    """Returns the names that a plan may have for its first kernel."""
    return tuple(name for each in BACKENDS for name in each.kernels)


def plan_type(kernel: str) -> type[Plan]:
    """Returns the type of the plans that name a kernel.

    Raises:
        ValueError: If no back end has it.
    """
    for each in BACKENDS:
        if kernel in each.kernels:
            return each.plan_type
    raise ValueError(f"kernel={kernel!r} is none of ours")


def named(name: str) -> Backend:
    """Returns the back end of a name; the emulator and stock MLX plan as on Metal."""
    return next((each for each in BACKENDS if each.name == name), BACKENDS[0])
