"""GGUF files, written by hand."""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.gguf_blocks import NUMBERS, PLAIN, draw_blocks

KINDS = ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array"]
KINDS += ["u64", "i64", "f64"]
"""Types of values, in the order of their numbers."""
LETTERS = dict(zip(KINDS, "BbHhIif?--Qqd", strict=True))
"""What `struct` calls them; texts and arrays have no name there."""


class Written(NamedTuple):
    """A tensor: name, type in ggml, shape with the rows first, bytes."""

    name: str
    type: str
    shape: tuple[int, ...]
    data: bytes


def text(value: str) -> bytes:
    octets = value.encode()
    return struct.pack("<Q", len(octets)) + octets


def value_bytes(kind: str, value: Any) -> bytes:
    """Returns a value without its type. An array's value is (type of items, items)."""
    if kind == "string":
        return text(value)
    if kind == "array":
        item, items = value
        head = struct.pack("<IQ", KINDS.index(item), len(items))
        return head + b"".join(value_bytes(item, each) for each in items)
    return struct.pack("<" + LETTERS[kind], value)


def guess(value: Any) -> tuple[str, Any]:
    """Returns the type that llama.cpp gives such a value, and the value."""
    if isinstance(value, list):
        items = [guess(each) for each in value]
        return "array", (items[0][0] if items else "i32", [each for _, each in items])
    names = {str: "string", bool: "bool", int: "u32", float: "f32"}
    return names[type(value)], value


def gguf_bytes(
    metadata: dict[str, Any],
    tensors: Sequence[Written] = (),
    *,
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """Returns a file."""
    octets = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, given in metadata.items():
        kind, value = given if isinstance(given, tuple) else guess(given)
        octets += (
            text(key) + struct.pack("<I", KINDS.index(kind)) + value_bytes(kind, value)
        )
    offset = 0
    for tensor in tensors:
        octets += text(tensor.name) + struct.pack("<I", len(tensor.shape))
        octets += b"".join(struct.pack("<Q", size) for size in tensor.shape[::-1])
        octets += struct.pack("<IQ", NUMBERS[tensor.type], offset)
        offset += _aligned(len(tensor.data), alignment)
    octets += bytes(-len(octets) % alignment)
    for tensor in tensors:
        octets += tensor.data + bytes(-len(tensor.data) % alignment)
    return octets


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: Iterable[Written] = ()
) -> Path:
    path.write_bytes(gguf_bytes(metadata, list(tensors)))
    return path


def random_tensor(
    name: str, type_name: str, shape: tuple[int, ...], random: np.random.Generator
) -> Written:
    if type_name in PLAIN:
        values = random.standard_normal(shape).astype(np.float32)
        return Written(name, type_name, shape, plain_bytes(type_name, values))
    octets = draw_blocks(type_name, shape, random)
    return Written(name, type_name, shape, octets.tobytes())


def plain_bytes(type_name: str, values: np.ndarray) -> bytes:
    """Returns numbers as F32, F16, or as BF16 without rounding."""
    if type_name == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2"}[type_name]).tobytes()


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
