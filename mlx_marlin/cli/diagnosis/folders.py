"""The folders of the user's cache: their sizes, their rights and what is wrong."""

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from mlx_marlin import cache

NAMES = ("emulator", "tuned", "gpus", "verdicts")
"""Folders that the package makes; others that exist are reported too."""
LOADED = ("emulator",)
"""Folders with code that is loaded: nobody else may write to them."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def collect() -> dict[str, Any]:
    """Returns the cache's root and the folders in it, as data that JSON can hold."""
    root = cache.folder(NAMES[0]).parent
    present = sorted(os.listdir(root)) if root.is_dir() else []
    names = [each for each in present if each in NAMES or (root / each).is_dir()]
    return {
        "root": str(root),
        "folders": [facts(root), *(facts(root / each) for each in names)],
    }


def facts(path: Path) -> dict[str, Any]:
    """Returns the size and the rights of a folder, and why it is unusable.

    Args:
        path: The folder, which may not exist.
    """
    found: dict[str, Any] = {"path": str(path), "files": 0, "bytes": 0, "rights": None}
    try:
        status = path.stat()
    except FileNotFoundError:
        return found | {"problem": _cannot_be_made(path)}
    except OSError as error:
        return found | {"problem": f"cannot be read: {error.strerror}"}
    sizes = _sizes(path)
    return found | {
        "files": len(sizes),
        "bytes": sum(sizes),
        "rights": stat.filemode(status.st_mode),
        "problem": _unusable(path, status),
    }


def _sizes(path: Path) -> list[int]:
    """Returns the bytes of each file below a folder; some may vanish meanwhile."""
    sizes = []
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                sizes.append(os.lstat(os.path.join(folder, name)).st_size)
            except OSError:
                continue
    return sizes


def _unusable(path: Path, status: os.stat_result) -> str | None:
    """Returns why nothing can be kept in a folder, or read from it safely."""
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder"
    if status.st_uid != os.getuid():
        return f"belongs to another user (user ID {status.st_uid})"
    if path.name in LOADED and status.st_mode & OTHERS_WRITE:
        rights = stat.filemode(status.st_mode)
        return f"can be written by other users ({rights}): run chmod go-w {path}"
    return _refuses_files(path)


def _cannot_be_made(path: Path) -> str | None:
    """Returns why a folder that does not exist cannot be made, or None."""
    above = next(each for each in path.parents if each.exists())
    reason = _refuses_files(above)
    return None if reason is None else f"does not exist, and {above} {reason}"


def _refuses_files(path: Path) -> str | None:
    """Returns why a file cannot be made in a folder, or None; leaves none there.

    The rights do not tell: root may do everything but write to a read-only file system.
    """
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        return f"cannot be written to: {error.strerror}"
    return None
