"""The devices of operations in a file that `mx.export_function` wrote.

The file has, for each operation, its stream and its name: three int32 (index of the
stream, type and index of the device), the length of the name as uint64, and the name.
"""

import mmap
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

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
