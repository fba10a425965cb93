"""The folders of the user's cache: sizes, access rights and problems."""

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from mlx_marlin import cache, removal

NAMES = ("emulator", "tuned", "models", "gpus", "verdicts")
"""Folders of the package; other folders in the cache are reported too."""


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
    sizes = removal.sizes(path)
    return found | {
        "files": len(sizes),
        "bytes": sum(sizes),
        "rights": stat.filemode(status.st_mode),
        "problem": _unusable(path, status),
    }


def _unusable(path: Path, status: os.stat_result) -> str | None:
    """Returns why a folder cannot be written to or read safely, or None."""
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder"
    # The root's own folders have facts of their own.
    is_root = path == cache.folder(NAMES[0]).parent
    inner = [] if is_root else [entry for entry in path.iterdir() if entry.is_dir()]
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
