"""The back ends by their names; one is imported when it is first asked for."""

from collections.abc import Iterator
from importlib import import_module
from typing import cast

from mlx_marlin.backends.base import Backend
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.plan import Plan

MODULES = {
    "metal": "mlx_marlin.backends.metal.backend",
    "cuda": "mlx_marlin.backends.cuda.backend",
}
"""The modules that implement `Backend`. The first one plans where no GPU runs the
kernels: for the emulator and stock MLX."""
FIRST = next(iter(MODULES))

_loaded: dict[str, Backend] = {}


def named(name: str) -> Backend:
    """Returns the back end of a name; the first one for "emulator" and "stock"."""
    name = name if name in MODULES else FIRST
    if name not in _loaded:
        _loaded[name] = cast(Backend, import_module(MODULES[name]))
    return _loaded[name]


def every(first: str | None = None) -> Iterator[Backend]:
    """Yields all back ends; each is imported when it is its turn."""
    known = [first] if first in MODULES else []
    yield from map(named, dict.fromkeys([*known, *MODULES]))


def default_device() -> PlanningDevice:
    """Returns the device to plan for where nothing says which: the first back end's."""
    device: PlanningDevice = named(FIRST).traits.default_device
    return device


def of_device(device: PlanningDevice) -> Backend:
    """Returns the back end that plans for a device."""
    return named(device.backend)


def kernels() -> tuple[str, ...]:
    """Returns the names that a plan may have for its first kernel."""
    return tuple(name for backend in every() for name in backend.traits.kernels)


def plan_type(kernel: str) -> type[Plan]:
    """Returns the type of the plans that name a kernel."""
    for backend in every():
        if kernel in backend.traits.kernels:
            return backend.traits.plan_type
    raise ValueError(f"kernel={kernel!r} is not one of {', '.join(kernels())}")
