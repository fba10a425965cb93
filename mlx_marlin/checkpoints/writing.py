"""Writes a checkpoint: its shards and copies, in a folder that appears complete."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import mlx.core as mx

from mlx_marlin import cache, regular_files
from mlx_marlin.checkpoints.folder import INDEX

BLOBS = Path("..", "..", "blobs")
"""Where the snapshots of the Hugging Face Hub's cache have their files, as links."""


def copy_within(file: Path, target: Path) -> None:
    """Copies a file of a checkpoint."""
    real = Path(os.path.realpath(file))
    folder = Path(os.path.realpath(file.parent))
    homes = [folder]
    if folder.parent.name == "snapshots":
        homes.append(Path(os.path.realpath(folder / BLOBS)))
    if real.parent not in homes:
        raise ValueError(
            f"{file} is a link to {real}, which is not copied: expected a file of the "
            f"same folder"
        )
    with (
        regular_files.named(target),
        regular_files.open_file(real, os.O_NOFOLLOW) as source,
        target.open("xb") as copy,
    ):
        shutil.copyfileobj(source, copy)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Makes `.NAME.partial` beside a path, and renames it to NAME after the block.

    If the block raises, the folder is removed, with the parents that were made for it.
    A folder that a killed process left is emptied and used again.
    """
    if path.exists():
        raise ValueError(f"{path} exists, expected the name of a new folder")
    partial = path.with_name(f".{path.name}.partial")
    with ExitStack() as stack:
        stack.enter_context(_parents(partial))
        partial.mkdir(exist_ok=True)
        opened = stack.enter_context(cache.own(partial))
        _lock(opened, partial)
        try:
            cache.clear(opened)
            yield partial
            partial.rename(path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Makes the parents of a path, and removes those again if the block raises."""
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):  # another process may have put a file there
            for folder in missing:
                folder.rmdir()
        raise


def _lock(opened: int, partial: Path) -> None:
    """Locks an open folder; the lock ends with the process."""
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(opened), partial.stat()):
            return
    raise ValueError(f"{partial}: another process is writing this folder")


class Shards:
    """Writes arrays to `model-*.safetensors` in a folder; use it in a `with` block.

    The arrays of one file are in memory until it is written. At the end of the block
    the files get their final names, and there is an index if there are several.
    """

    shard_bytes = 1_000_000_000  # of arrays, after which another file is begun

    def __init__(self, path: Path, metadata: dict[str, str]) -> None:
        self._path = path
        self._metadata = metadata
        self._files: list[Path] = []
        self._arrays: dict[str, mx.array] = {}  # of the file that is not written yet
        self._nbytes = self._total = 0  # of those, and of all
        self._shard_of: dict[str, int] = {}

    def __enter__(self) -> Self:
        """Begins the block."""
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Finishes the files, unless an exception leaves the block."""
        if error is None:
            self._write()
            self._name_files()

    def add(self, name: str, array: mx.array) -> None:
        """Adds an array, which is evaluated."""
        if name in self._shard_of:
            raise ValueError(f"{self._path}: tensor {name!r} occurs twice")
        if self._nbytes + array.nbytes > self.shard_bytes:
            self._write()
        mx.eval(array)
        self._arrays[name] = array
        self._shard_of[name] = len(self._files)
        self._nbytes += array.nbytes
        self._total += array.nbytes

    def _write(self) -> None:
        if not self._arrays:
            return
        file = self._path / f"model-{len(self._files) + 1:05}.safetensors"
        try:
            mx.save_safetensors(str(file), self._arrays, self._metadata)
        except RuntimeError as error:  # such as a full device
            raise OSError(f"{file}: {error}") from error
        self._files.append(file)
        self._arrays.clear()
        self._nbytes = 0

    def _name_files(self) -> None:
        count = len(self._files)
        if count == 1:
            self._files[0].rename(self._path / "model.safetensors")
        if count < 2:
            return
        final = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for file, name in zip(self._files, final, strict=True):
            file.rename(self._path / name)
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": {name: final[i] for name, i in self._shard_of.items()},
        }
        regular_files.write(self._path / INDEX, json.dumps(index, indent=1))
