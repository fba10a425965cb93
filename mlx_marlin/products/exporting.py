"""`exporting`: graphs with our kernels for a GPU that this machine may not have.

A file of `mx.export_function` has, for each operation, its stream and its name: three
int32 (index of the stream, type and index of the device), the length of the name as
uint64, and the name.
"""

import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_marlin import guard, state
from mlx_marlin.backends import devices, registry, selection
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.products import autodiff


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
            move_to_gpu(file)
        return result

    mx.export_function = export_function
    try:
        yield
    finally:
        mx.export_function = original


Stream = tuple[int, int, int]
"""Index of a stream, type of its device (0: CPU, 1: GPU), index of the device."""
CPU: Stream = (0, 0, 0)
GPU: Stream = (-1, 1, 0)
"""Streams that MLX writes for operations, and for kernels where it has no GPU."""
_STREAM = struct.Struct("<iii")
_LENGTH = struct.Struct("<Q")
_NAME = rb"(?=[\x03-\x40]\x00{7}[A-Z][A-Za-z0-9]{2})"
_LETTERS = re.compile(rb"[A-Za-z0-9]+")


def operations(data: "bytes | mmap.mmap", stream: Stream) -> Iterator[tuple[int, str]]:
    """Yields where operations of a stream stand in a file, and their names."""
    pattern = re.compile(re.escape(_STREAM.pack(*stream)) + _NAME, re.DOTALL)
    for found in pattern.finditer(data):
        (length,) = _LENGTH.unpack_from(data, found.end())
        start = found.end() + _LENGTH.size
        name = data[start : start + length]
        if _LETTERS.fullmatch(name):
            yield found.start(), name.decode("ascii")


def move(file: "str | os.PathLike[str]", source: Stream, target: Stream) -> None:
    """Assigns the operations of one stream to another, in place."""
    with (
        Path(file).open("r+b") as opened,
        mmap.mmap(opened.fileno(), 0) as data,
    ):
        for start, _ in list(operations(data, source)):
            _STREAM.pack_into(data, start, *target)


def move_to_gpu(file: "str | os.PathLike[str]") -> None:
    """Assigns the operations that MLX recorded for the CPU to the GPU, in place."""
    move(file, CPU, GPU)
