"""The user's cache: files that can be made again, read only if nobody else wrote them.

A file counts as absent if it, its folder or the package's root belongs to another user
or can be written by one. Where the cache cannot be used, a temporary folder takes its
place until the process ends.
"""

import atexit
import os
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

import platformdirs

TEMPORARY_PREFIX = "mlx_marlin-"
"""Of temporary folders, before the number of the process."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_replacement: Path | None = None
"""The temporary folder, once the cache could not be written to."""


def root() -> Path:
    """Returns the package's folder in the user's cache; it may not exist."""
    return Path(platformdirs.user_cache_dir("mlx_marlin"))


def folder(name: str) -> Path:
    """Returns the package's folder of a name in the user's cache; it may not exist."""
    return root() / name


def why_untrusted(path: Path) -> str | None:
    """Returns why others may have written a file or folder, or None.

    The folder of a file is checked too, and so is the package's root above them.

    Args:
        path: A file or a folder.

    Raises:
        OSError: If it does not exist, or its owner cannot be read.
    """
    above = root()
    places = [path] if path.is_dir() else [path, path.parent]
    if above in path.parents and above not in places:
        places.append(above)
    for place in places:
        status = os.stat(place)
        if status.st_uid != os.geteuid():
            return (
                f"{place} belongs to the user {status.st_uid}, expected "
                f"{os.geteuid()}, who runs this process"
            )
        if status.st_mode & _OTHERS_WRITE:
            mode = stat.S_IMODE(status.st_mode)
            return f"{place} can be written by other users (mode {mode:04o})"
    return None


def make(folder: Path) -> None:
    """Makes a folder that only this user can read and write, if it is missing.

    Raises:
        OSError: If it cannot be made, or is not trusted.
    """
    # One by one: `parents=True` gives those in between the mode that umask leaves.
    for each in (*reversed(folder.parents), folder):
        each.mkdir(mode=0o700, exist_ok=True)
    if reason := why_untrusted(folder):
        raise PermissionError(reason)


def write(folder: Path, file_name: str, content: bytes) -> Path:
    """Writes a file that only this user can read and write, and returns its path.

    Readers see the old file or the new one.

    Args:
        folder: Made if it is missing.
        file_name: The file's name in it.
        content: All of the file.

    Raises:
        OSError: If the file cannot be written, or the folder is not trusted.
    """
    make(folder)
    handle, fresh = tempfile.mkstemp(suffix=".new", dir=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(fresh, folder / file_name)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise
    return folder / file_name


def find(name: str, file_name: str) -> Path | None:
    """Returns a file that `store` has kept, if it exists and is trusted.

    Args:
        name: The folder's name in the cache.
        file_name: The file's name in it.
    """
    replaced = [_replacement / name] if _replacement else []
    for place in (*replaced, folder(name)):
        try:
            if why_untrusted(place / file_name) is None:
                return place / file_name
        except OSError:
            continue
    return None


def store(name: str, file_name: str, content: bytes) -> Path:
    """Keeps a file and returns its path.

    Where the user's cache cannot be written to or is not trusted, the file goes to a
    temporary folder, which is removed when the process ends. The first time that
    happens in a process, it gives a warning.

    Args:
        name: The folder's name in the cache.
        file_name: The file's name in it.
        content: All of the file.

    Raises:
        OSError: If the temporary folder cannot be written to either.
    """
    if _replacement is None:
        try:
            return write(folder(name), file_name, content)
        except OSError as error:
            place = _replace()
            path = write(place / name, file_name, content)
            warnings.warn(
                f"mlx_marlin: the cache {folder(name)} cannot be used: {error}; "
                f"{place} takes its place until this process ends",
                RuntimeWarning,
                stacklevel=2,
            )
            return path
    return write(_replacement / name, file_name, content)


def temporary_prefix() -> str:
    """Returns how the names of this process's temporary folders begin."""
    return f"{TEMPORARY_PREFIX}{os.getpid()}-"


def _replace() -> Path:
    """Makes the temporary folder that takes the cache's place."""
    global _replacement
    _replacement = Path(tempfile.mkdtemp(prefix=temporary_prefix()))
    atexit.register(_remove, _replacement, os.getpid())
    return _replacement


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork, whose parent still uses it
        shutil.rmtree(folder, ignore_errors=True)
