"""The folders of the user's cache: sizes, access rights and problems."""

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from mlx_marlin import cache

NAMES = ("emulator", "tuned", "models", "gpus", "verdicts")
"""Folders of the package; other folders in the cache are reported too."""
LOADED = ("emulator",)
"""Folders with libraries that are loaded: other users must not write to them."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def collect() -> dict[str, Any]:
    """Returns the root of the cache and its folders, as values for JSON."""
    root = cache.folder(NAMES[0]).parent
    entries = sorted(os.listdir(root)) if root.is_dir() else []
    names = [name for name in entries if name in NAMES or (root / name).is_dir()]
    return {
        "root": str(root),
        "folders": [facts(root), *(facts(root / name) for name in names)],
    }


def facts(path: Path) -> dict[str, Any]:
    """Returns the size and access rights of a folder, and why it cannot be used.

    Args:
        path: The folder; it may not exist.
    """
    found: dict[str, Any] = {"path": str(path), "files": 0, "bytes": 0, "rights": None}
    try:
        status = path.stat()
    except FileNotFoundError:
        return found | {"problem": _cannot_be_created(path)}
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
    """Returns the sizes of all files in a folder, skipping files that disappear."""
    sizes = []
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                sizes.append(os.lstat(os.path.join(folder, name)).st_size)
            except OSError:
                continue
    return sizes


def _unusable(path: Path, status: os.stat_result) -> str | None:
    """Returns why a folder cannot be written to or read safely, or None."""
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder"
    if status.st_uid != os.getuid():
        return f"belongs to another user (user ID {status.st_uid})"
    if path.name in LOADED and status.st_mode & OTHERS_WRITE:
        rights = stat.filemode(status.st_mode)
        return f"can be written by other users ({rights}): run chmod go-w {path}"
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
