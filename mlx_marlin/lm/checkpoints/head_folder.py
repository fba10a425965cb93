"""The tensors of a head in a folder, and a file that keeps them beside a conversion."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_marlin.checkpoints import reading
from mlx_marlin.checkpoints.folder import (
    Folder,
    StoredArray,
    read_header,
    read_json,
    stored_shapes,
)
from mlx_marlin.checkpoints.location import check_files
from mlx_marlin.lm.drafts.heads import FAMILIES, HeadFamily, Trunk

FILE = "mtp.safetensors"
"""Where a conversion keeps a head: mlx-lm reads files that begin with "model" only."""
FOUND_IN = (
    "heads are in the original repository of a model, in repositories whose name has "
    "-MTP-, and in folders that mlx-marlin convert made of originals; most conversions "
    "to MLX's format have dropped them"
)


class HeadFolder(Folder):
    """The arrays of a head among those of a folder, under the names of its places."""

    def __init__(self, path: Path, family: HeadFamily, layers: int) -> None:
        """Reads headers.

        `layers`: the number of the model's layers.
        """
        self.path, self._unread = path, {}
        check_files(path)
        files = {file: stored_shapes(file) for file in path.glob("*.safetensors")}
        known = [name for file in sorted(files) for name in files[file]]
        self.places = family.names(known, layers)
        stored: dict[str, StoredArray] = {}
        for file in sorted(files):  # of others, nothing is checked
            if self.places.keys() & files[file].keys():
                stored |= read_header(file)
        self.stored = {name: stored[name] for name in self.places}
        self.arrays, self._names = self.stored, {name: name for name in self.places}
        file = path / "config.json"
        self.config = read_json(file) if file.exists() else {}
        self.config.pop("mlx_marlin", None)  # of the model's layers
        if any(name.endswith(".scales") for name in self.places):
            self.config["quantization"] = {}  # told by the shapes

    def place(self, places: dict[str, str]) -> None:
        """Gives the arrays the names that they have in the head's model."""
        self._names = {
            place.format(**places): name for name, place in self.places.items()
        }
        self.arrays = {new: self.stored[name] for new, name in self._names.items()}

    def read(self, name: str) -> mx.array:
        """Returns an array, as `Folder` does."""
        return self._taken(self.arrays[name].file, self._names[name])


def check_found(
    where: object, places: dict[str, str], family: HeadFamily, layers: int
) -> None:
    """Raises a ValueError if there is no head."""
    if not places:
        parts = [part for part in family.parts if part][:3]
        raise ValueError(
            f"{where}: no head: looked for tensors "
            f"{[family.prefix.format(n=layers) + part for part in parts]}; {FOUND_IN}"
        )


def head_of(path: Path, model: Any) -> HeadFolder | None:
    """Returns the head that a folder has for a model, if it has one."""
    trunk = Trunk(model)
    family = FAMILIES.get(trunk.module)
    if family is None or not path.is_dir():
        return None
    head = HeadFolder(path, family, trunk.layers)
    return head if head.places else None


def keep_head(head: HeadFolder, folder: Path) -> None:
    """Writes a head's tensors to a file of a folder, under their own names.

    Codes that MLX does not have are decoded to bfloat16, as `load_heads` reads plain
    weights too.
    """
    arrays = {}
    for tensor in reading.folder_tensors(head, for_model=True):
        value = tensor.read()
        if not isinstance(value, mx.array):
            value = value.stored() if hasattr(value, "stored") else value
            value = value.values().astype(mx.bfloat16)
        arrays[tensor.name] = value
    mx.save_safetensors(str(folder / FILE), arrays, {"format": "mlx"})
