"""Checks the header of a safetensors file before any tensor of it is read.

Format: https://huggingface.co/docs/safetensors, "Format": eight bytes with the size of
the header, the header in JSON, the data.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from mlx_marlin import regular_files
from mlx_marlin.regular_files import quoted

LARGEST_HEADER = 100_000_000
"""Bytes; the safetensors library has the same limit."""

LONGEST_NAME = 200
"""Letters of a tensor's name, which messages quote; a model's have at most half."""
MOST_AXES = 32

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
}
"""Bytes of an element, for the dtypes that MLX reads; those of 8 bits become uint8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """An array in a safetensors file."""

    file: Path  # The file
    dtype: str  # Name in the header, such as "F16"
    shape: tuple[int, ...]  # Shape
    begin: int  # First byte, counted from the end of the header
    end: int  # Byte after the last

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin


def read_header(file: Path) -> dict[str, StoredArray]:
    """Returns the arrays of a file by name, checked against the file's size."""
    parsed, data_bytes = _parsed(file)
    arrays = {
        name: _stored_array(file, name, entry, data_bytes)
        for name, entry in parsed.items()
    }
    _check_overlaps(file, arrays)
    return arrays


def shapes(file: Path) -> dict[str, list[int]]:
    """Returns the shapes of arrays by name, not compared with the file's size."""
    return {
        name: entry["shape"]
        for name, entry in _parsed(file)[0].items()
        if isinstance(entry, dict) and _are_sizes(entry.get("shape"))
    }


def _parsed(file: Path) -> tuple[dict[str, Any], int]:
    """Returns the entries of the arrays by name, and the bytes of the data."""
    with regular_files.open_file(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        # A file of /proc has no size, and perhaps nothing to read.
        length = int.from_bytes(stream.read(8) if size else b"", "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            raise ValueError(
                f"{file}: header of {length} bytes, expected at most "
                f"{max(0, min(LARGEST_HEADER, size - 8))} in a file of {size} bytes"
            )
        text = stream.read(length)
    parsed = parse_json(text, str(file))
    parsed.pop("__metadata__", None)
    return parsed, size - 8 - length


def parse_json(text: bytes | str, source: str) -> dict[str, Any]:
    """Returns a JSON object."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise ValueError(f"key {quoted(twice)} occurs twice")
        return result

    try:
        parsed = json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(
            f"{source}: JSON {type(parsed).__name__}, expected an object"
        ) from None
    return parsed


def _stored_array(file: Path, name: str, entry: object, data_bytes: int) -> StoredArray:
    where = f"{file}: tensor {quoted(name)}"
    if len(name) > LONGEST_NAME:
        raise ValueError(f"{where}: expected a name of {LONGEST_NAME} letters or less")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= {
        *entry
    }:
        raise ValueError(f"{where}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(
            f"{where}: dtype {quoted(dtype)}, expected one of {[*DTYPE_BYTES]}"
        )
    # MLX's sizes have 32 bits.
    fits = _are_sizes(shape) and max(shape, default=0) < 2**31
    if (
        not fits
        or len(shape) > MOST_AXES
        or not _are_sizes(offsets)
        or len(offsets) != 2
    ):
        raise ValueError(
            f"{where}: shape={quoted(shape)} and data_offsets={quoted(offsets)}, "
            f"expected lists of integers from 0, up to {MOST_AXES} of them for a shape"
        )
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise ValueError(
            f"{where}: bytes {begin} to {end}, expected a range within the "
            f"{data_bytes} bytes of data"
        )
    expected = prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise ValueError(
            f"{where}: {end - begin} bytes, expected {expected} for {dtype} {shape}"
        )
    return StoredArray(file=file, dtype=dtype, shape=(*shape,), begin=begin, end=end)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**63 for value in values
    )


def _check_overlaps(file: Path, arrays: dict[str, StoredArray]) -> None:
    ordered = sorted(arrays.items(), key=lambda item: (item[1].begin, item[1].end))
    for (first, before), (second, after) in pairwise(ordered):
        if after.begin < before.end:
            raise ValueError(f"{file}: tensors {first!r} and {second!r} overlap")
