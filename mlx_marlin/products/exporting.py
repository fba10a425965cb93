"""`exporting`: graphs with our kernels for a GPU that this machine may not have."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import mlx.core as mx

from mlx_marlin import guard, state
from mlx_marlin.backends import devices, registry, selection
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.products import autodiff
from mlx_marlin.products import exported_streams as streams


@contextmanager
def exporting(device: str) -> Iterator[None]:
    """Makes `mx.export_function` write our kernels for a named GPU, on any machine.

    In this context all products that our kernels support are planned for that GPU, none
    is left to stock MLX for speed, and no kernel is checked or run: graphs can be
    built, but not computed. Load, `optimize` and `pack` before. Where MLX has no GPU,
    `mx.export_function` to a file assigns all operations to the GPU of the reader. The
    context is one of the process, and graphs must be built in the thread that entered.

    Args:
        device: An Apple GPU: "M3 Max", "Apple M3 Max, 30 cores" or an architecture such
            as "applegpu_g15s", which stands for its chip with the most cores.

    Raises:
        ValueError: If `device` does not name such a GPU.
    """
    target = _target(device)
    environment = {
        selection.ENVIRONMENT: registry.of_device(target).name,
        devices.ENVIRONMENT: f"{target.name}, {target.cores} cores",
        guard.ENVIRONMENT: "0",  # a kernel cannot be checked without its GPU
    }
    with _environment(environment), autodiff.without_vjp(), _files_for_gpus():
        yield


def _target(device: object) -> PlanningDevice:
    """Returns the device of a name."""
    backend = registry.named(registry.FIRST)
    expected = f"expected {backend.traits.device_noun}, such as 'M3 Max'"
    if not isinstance(device, str):
        raise ValueError(f"device={device!r}: {expected}")
    try:
        found = devices.named(device)
    except ValueError as error:
        raise ValueError(f"device={device!r}: {error}") from None
    if registry.of_device(found) is not backend:
        raise ValueError(f"device={device!r}: {expected}")
    return found


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables, and forgets what was decided with others."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    state.reset()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        state.reset()


@contextmanager
def _files_for_gpus() -> Iterator[None]:
    """Makes `mx.export_function` assign operations to a GPU where MLX has none.

    MLX cannot be asked for it: it has no stream of a device that is not there.
    """
    original: Any = mx.export_function
    if mx.is_available(mx.gpu):
        yield
        return

    @wraps(original)
    def export_function(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        file = args[0] if args else None
        if isinstance(file, str | os.PathLike):
            streams.move_to_gpu(file)
        return result

    mx.export_function = export_function
    try:
        yield
    finally:
        mx.export_function = original
