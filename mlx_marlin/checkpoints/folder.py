"""A folder of safetensors files with a config.json, as Hugging Face lays it out.

Headers of safetensors files are checked before any tensor is read: eight bytes with the
size of the header, the header in JSON, the data (https://huggingface.co/docs/safetensors,
"Format").
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin import regular_files
from mlx_marlin.checkpoints.location import check_location
from mlx_marlin.regular_files import quoted, short

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


def stored_shapes(file: Path) -> dict[str, list[int]]:
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


LAYERS = re.compile(r"(num|n)(_\w+)?_layers?")
"""Keys of a config: a number of layers that mlx-lm makes."""
SIZES = re.compile(r"\w+_(size|dims?|heads|experts|rank)|d_model|n_embd")
"""Likewise, a number of rows or columns of a weight."""
USUAL_SIZE = 2**20
"""So many rows are no danger, whatever is stored."""
FEW_LAYERS = 1000
"""So many are made in less than a second, whatever is stored."""
DROPPED = ("vision", "audio")
"""Beginnings of keys: parts of a model that mlx-lm drops, with their layers."""
INDEX = "model.safetensors.index.json"


class Folder:
    """The arrays of a checkpoint by name; each is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Reads config, index and headers."""
        check_location(path)
        self.path = path
        self.config = read_json(path / "config.json")
        check_sizes(path, self.config)
        self.arrays: dict[str, StoredArray] = {}
        for file in _weight_files(path):
            for name, array in read_header(file).items():
                other = self.arrays.setdefault(name, array)
                if other is not array:
                    raise ValueError(
                        f"{file}: tensor {name!r} occurs in {other.file.name} too"
                    )
        self._unread: dict[Path, dict[str, mx.array]] = {}

    def read(self, name: str) -> mx.array:
        """Returns an array, which MLX reads from the file when it is evaluated.

        No reference to it is kept, so that its memory is freed with the caller's.
        """
        if name not in self.arrays:
            raise ValueError(f"{self.path}: tensor {quoted(name)} is missing")
        return self._taken(self.arrays[name].file, name)

    def _taken(self, file: Path, name: str) -> mx.array:
        unread = self._unread.get(file)
        if unread is None or name not in unread:
            loaded = _load(file)
            unread = self._unread[file] = loaded
        return unread.pop(name)

    @cached_property
    def columns(self) -> dict[str, int]:
        """Columns of the layers of mlx-lm's model; none if it has no such model."""
        try:
            layers: Any = new_model(self.config).named_modules()
        except Exception:  # it does not check configs, and need not be installed
            return {}
        return {name: own.weight.shape[-1] for name, own in layers if "weight" in own}


def new_model(config: dict[str, Any]) -> nn.Module:
    """Returns mlx-lm's model of a config; its random parameters are never computed."""
    from mlx_lm import utils

    if config.get("model_file") is not None:
        raise ValueError("the code of another model, which is not run")
    model_class, arguments = utils._get_classes(config)
    model: nn.Module = model_class(arguments.from_dict(config))
    return model


def check_sizes(path: Path, config: dict[str, Any]) -> dict[str, list[int]]:
    """Checks a config's numbers that make a model larger than what is stored."""
    shapes: dict[str, list[int]] = {}
    for file in path.glob("*.safetensors"):
        shapes |= stored_shapes(file)
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    bounds = {
        LAYERS: max(FEW_LAYERS, len(shapes)),
        # A word of 32 bits holds 32 columns or less.
        SIZES: max(USUAL_SIZE, 32 * largest),
    }
    _check_bounds(path / "config.json", config, bounds)
    return shapes


def _check_bounds(
    file: Path, config: dict[str, Any], bounds: dict[re.Pattern[str], int]
) -> None:
    for key, value in config.items():
        if isinstance(value, dict) and not key.startswith(DROPPED):
            _check_bounds(file, value, bounds)
        for pattern, most in bounds.items():
            is_number = pattern.fullmatch(key) and isinstance(value, int | float)
            if is_number and value > most:
                raise ValueError(
                    f"{file}: {short(key)} is {quoted(value)}, expected at most "
                    f"{most}, by the shapes of the stored tensors"
                )


@contextmanager
def naming(path: Path, tensor: str) -> Iterator[None]:
    """Adds a checkpoint and a tensor to the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        if message.startswith(str(path)):
            raise
        raise ValueError(f"{path}: tensor {quoted(tensor)}: {message}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file."""
    return parse_json(regular_files.read(file), str(file))


def _load(file: Path) -> dict[str, mx.array]:
    try:
        loaded = mx.load(str(file))
    except RuntimeError as error:
        raise ValueError(f"{file}: {error}") from None
    assert isinstance(loaded, dict)
    return loaded


def _weight_files(path: Path) -> list[Path]:
    """Returns the files to read: those of the index, or else what mlx-lm reads.

    mlx-lm does not look at the index, and tools that write other weights into a folder
    leave it behind. So it decides nothing if none of its files is there, and it need
    not know the tensors.
    """
    listed: list[Path] = []
    if (path / INDEX).exists():
        listed = [path / name for name in sorted({*weight_map(path).values()})]
    there = [file for file in listed if file.exists()]
    if there and there != listed:
        (missing, *_) = {*listed} - {*there}
        raise FileNotFoundError(f"{missing}: no such file, but {INDEX} names it")
    files = there or sorted(path.glob("model*.safetensors"))
    return files or sorted(path.glob("*.safetensors"))


def weight_map(path: Path) -> dict[str, str]:
    """Returns the files of a folder's tensors by their names, as its index says."""
    file = path / INDEX
    known = read_json(file).get("weight_map")
    if not isinstance(known, dict) or not known:
        raise ValueError(f"{file}: expected a weight_map of tensor and file names")
    for tensor, name in known.items():
        # A name with a folder could lead out of the checkpoint.
        is_plain = isinstance(name, str) and Path(name).name == name
        if not is_plain or not name.endswith(".safetensors"):
            raise ValueError(
                f"{file}: tensor {quoted(tensor)} in "
                f"{quoted(name)}, expected a safetensors file in the "
                f"same folder"
            )
    return known
