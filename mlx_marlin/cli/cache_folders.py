"""The folders of the user's cache: contents, sizes, access rights and problems."""

import stat
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_marlin import cache, removal

CONTENTS = {
    "emulator": "kernels compiled for the emulator",
    "gpus": "measured figures of CUDA devices",
    "kernels": "compiled CUDA kernels",
    "models": "settings of optimize that mlx-marlin tune found",
    "tuned": "results of mlx-marlin tune",
    "verdicts": "checks of kernels on this machine",
}
"""Description of a folder, by name. Other folders are listed without one."""


@dataclass(frozen=True)
class CacheFolder:
    """A folder of the cache."""

    name: str  # Name of the folder
    path: str  # Path of the folder
    contents: str  # Description of its contents, or ""
    files: int  # Number of files, including those in subfolders
    bytes: int  # Total size of the files
    rights: str | None  # Its access rights; None if it does not exist
    problem: str | None  # Why it cannot be used, or None


def listed() -> list[CacheFolder]:
    """Returns the folders of the cache, sorted by name, and files in their place."""
    root = cache.root()
    entries = sorted(root.iterdir()) if root.is_dir() else []
    return [
        describe(path) for path in entries if path.is_dir() or path.name in CONTENTS
    ]


def describe(path: Path) -> CacheFolder:
    """Returns the facts of a folder of the cache, or of its root."""
    sizes = removal.sizes(path)
    contents = CONTENTS.get(path.name, "")
    try:
        rights, problem = stat.filemode(path.stat().st_mode), _unusable(path)
    except FileNotFoundError:
        rights, problem = None, _cannot_be_created(path)
    except OSError as error:
        rights, problem = None, f"cannot be read: {error.strerror}"
    return CacheFolder(
        name=path.name,
        path=str(path),
        contents=f"{contents} (a link)" if path.is_symlink() else contents,
        files=len(sizes),
        bytes=sum(sizes),
        rights=rights,
        problem=problem,
    )


def _unusable(path: Path) -> str | None:
    """Returns why a folder cannot be written to or read safely, or None."""
    if not path.is_dir():
        return "is not a folder"
    # The root's own folders have facts of their own.
    inner = [] if path == cache.root() else filter(Path.is_dir, path.iterdir())
    reasons = filter(None, map(cache.why_untrusted, (path, *inner)))
    if reason := next(reasons, None):
        return f"is not used: {reason}"
    return _refuses_files(path)


def _cannot_be_created(path: Path) -> str | None:
    """Returns why a missing folder cannot be created, or None."""
    parent = next(parent for parent in path.parents if parent.exists())
    reason = _refuses_files(parent)
    return None if reason is None else f"does not exist, and {parent} {reason}"


def _refuses_files(path: Path) -> str | None:
    """Returns why a file cannot be created in a folder, or None.

    Creates a temporary file: access rights do not apply to root, and do not show that a
    file system is read-only.
    """
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        return f"cannot be written to: {error.strerror}"
    return None


def check_writable(folder: Path, prepare: Callable[[Path], Any]) -> None:
    """Checks before measurements, which take minutes, that results can be kept."""
    try:
        with prepare(folder) or nullcontext():
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            f"the results cannot be kept in {folder}: {error.strerror or error}"
        ) from error


def size_text(count: int) -> str:
    """Returns a number of bytes with its unit."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
