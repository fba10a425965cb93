"""A folder of safetensors files with a config.json, as Hugging Face lays it out."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin import regular_files
from mlx_marlin.checkpoints import safetensors_header
from mlx_marlin.checkpoints.location import check_location
from mlx_marlin.checkpoints.safetensors_header import (
    StoredArray,
    parse_json,
    read_header,
)
from mlx_marlin.regular_files import quoted, short

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
        file = self.arrays[name].file
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
        shapes |= safetensors_header.shapes(file)
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
        listed = [path / name for name in sorted({*_weight_map(path).values()})]
    there = [file for file in listed if file.exists()]
    if there and there != listed:
        (missing, *_) = {*listed} - {*there}
        raise FileNotFoundError(f"{missing}: no such file, but {INDEX} names it")
    files = there or sorted(path.glob("model*.safetensors"))
    return files or sorted(path.glob("*.safetensors"))


def _weight_map(path: Path) -> dict[str, str]:
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
