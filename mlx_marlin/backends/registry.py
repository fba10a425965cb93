"""The back ends, and which of them a device or a plan belongs to."""

from mlx_marlin.backends.base import Backend
from mlx_marlin.backends.cuda.backend import CudaBackend
from mlx_marlin.backends.metal.backend import MetalBackend
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.gather_plan import GatherPlan
from mlx_marlin.planning.plan import Plan

BACKENDS: list[Backend] = [MetalBackend(), CudaBackend()]
"""The first one plans where no GPU runs the kernels: for the emulator and stock MLX."""


def of_device(device: PlanningDevice) -> Backend:
    """Returns the back end that plans for a device."""
    return next(
        backend for backend in BACKENDS if isinstance(device, backend.device_type)
    )


def of_plan(plan: Plan | GatherPlan) -> Backend:
    """Returns the back end that runs a plan."""
    if isinstance(plan, GatherPlan):
        return next(
            backend
            for backend in BACKENDS
            if isinstance(plan, backend.gather.plan_type)
        )
    return next(backend for backend in BACKENDS if isinstance(plan, backend.plan_type))


def kernels() -> tuple[str, ...]:
    """Returns the names that a plan may have for its first kernel."""
    return tuple(name for backend in BACKENDS for name in backend.kernels)


def plan_type(kernel: str) -> type[Plan]:
    """Returns the type of the plans that name a kernel.

    Raises:
        ValueError: If no back end has it.
    """
    for backend in BACKENDS:
        if kernel in backend.kernels:
            return backend.plan_type
    raise ValueError(f"kernel={kernel!r} is not one of {', '.join(kernels())}")


def named(name: str) -> Backend:
    """Returns the back end of a name; the first one for "emulator" and "stock"."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    return BACKENDS[0]
