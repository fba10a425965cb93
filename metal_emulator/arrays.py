"""Conversion of MLX arrays to kernel arguments, and of kernel output to arrays."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from metal_emulator.memory import Argument, MappedArgument

if TYPE_CHECKING:
    import numpy.typing as npt

_NUMPY = {
    mx.bool_: "bool",
    mx.int8: "int8",
    mx.int16: "int16",
    mx.int32: "int32",
    mx.int64: "int64",
    mx.uint8: "uint8",
    mx.uint16: "uint16",
    mx.uint32: "uint32",
    mx.uint64: "uint64",
    mx.float16: "float16",
    mx.bfloat16: "uint16",  # NumPy has no bfloat16
    mx.float32: "float32",
    mx.complex64: "complex64",
}


def raw_array(array: mx.array) -> npt.NDArray[Any]:
    """Returns a NumPy view of an array's memory, bfloat16 as uint16."""
    import numpy as np

    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


@functools.cache
def _fresh_residue() -> int:
    """Returns the address modulo 16 at which MLX's CPU buffers start.

    On a GPU, buffers start at a multiple of 16.
    """
    return int(raw_array(mx.zeros((64,), mx.uint8)).ctypes.data) % 16


def input_argument(
    name: str, array: mx.array, copy_strided: bool
) -> tuple[npt.NDArray[Any], Argument]:
    """Converts an input."""
    import numpy as np

    raw = raw_array(array)
    residue = (raw.ctypes.data - _fresh_residue()) % 16
    if not raw.flags.c_contiguous:
        if not copy_strided:
            return raw, _strided(name, raw, residue)
        raw, residue = np.ascontiguousarray(raw), 0
    contents = raw.reshape(-1).view(np.uint8)
    return raw, Argument(name, contents, contents.size, residue)


def _strided(name: str, raw: npt.NDArray[Any], residue: int) -> Argument:
    """Converts a view: all bytes from its first to its last element in memory."""
    import numpy as np

    extents = [(n - 1) * step for n, step in zip(raw.shape, raw.strides, strict=True)]
    before = -sum(extent for extent in extents if extent < 0)
    size = before + sum(extent for extent in extents if extent > 0) + raw.itemsize
    block = (ctypes.c_uint8 * size).from_address(raw.ctypes.data - before)
    contents = np.ctypeslib.as_array(block)
    return Argument(name, contents, size, (residue - before) % 16, origin=before)


def info_arguments(
    raw: npt.NDArray[Any], wanted: tuple[bool, bool, bool], names: Iterator[str]
) -> list[Argument]:
    """Returns an array's metadata as kernel arguments."""
    import numpy as np

    if not raw.ndim:
        return []
    shape, strides, ndim = wanted
    values: list[npt.NDArray[Any]] = []
    if shape:
        values.append(np.array(raw.shape, np.int32))
    if strides:
        values.append(np.array(raw.strides, np.int64) // raw.itemsize)
    if ndim:
        values.append(np.array([raw.ndim], np.int32))
    return [
        Argument(next(names), value.view(np.uint8), value.nbytes, 0) for value in values
    ]


def bytes_argument(name: str, content: bytes) -> Argument:
    """Returns the memory of a number or a struct."""
    import numpy as np

    return Argument(name, np.frombuffer(content, np.uint8), len(content), 0)


def output_argument(
    name: str,
    shape: Sequence[int],
    dtype: mx.Dtype,
    init_value: float | None,
    start: mx.array | None = None,
) -> Argument:
    """Returns the memory of an output; without `init_value` it is poison."""
    import numpy as np

    size = math.prod(shape) * dtype.size
    contents = None
    if start is not None:
        if not isinstance(start, mx.array) or (start.nbytes, start.dtype) != (
            size,
            dtype,
        ):
            raise ValueError(
                f"input {name!r} is an output too, expected an array of its shape "
                f"{tuple(shape)} and dtype {dtype}"
            )
        contents = np.array(raw_array(start)).reshape(-1).view(np.uint8)
    elif init_value is not None:
        # mx.full returns float32 for a float, even if dtype is an integer.
        filled = raw_array(mx.full(tuple(shape), init_value, dtype).astype(dtype))
        contents = filled.reshape(-1).view(np.uint8)
    return Argument(name, contents, size, 0, writable=True)


def output_array(
    buffer: MappedArgument, shape: Sequence[int], dtype: mx.Dtype
) -> mx.array:
    """Returns a copy of an output."""
    if not buffer.argument.size:
        return mx.zeros(tuple(shape), dtype)
    values = mx.array(buffer.contents().view(_NUMPY[dtype]).reshape(shape))
    return values.view(mx.bfloat16) if dtype == mx.bfloat16 else values
