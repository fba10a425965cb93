"""The user's cache of compiled kernels.

A library of the cache is native code, so a file is ignored if it, its folder or a
folder above it in the cache belongs to another user or can be written by other users.
If the cache cannot be used, a temporary folder replaces it until the process ends.
"""

import atexit
import os
import shutil
import stat
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import platformdirs

APPLICATION = "mlx_marlin"
"""The cache is that of the distribution: `mlx-marlin cache` lists and limits it."""
FOLDER = "emulator"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_replacement: Path | None = None
"""The temporary folder that replaces the cache, or None."""


def root() -> Path:
    """Returns the distribution's folder in the user's cache; it may not exist.

    A user without a home, as in some containers, has a private temporary folder.
    """
    with suppress(RuntimeError):  # of platformdirs 4.14; before, `~` stays a name
        path = Path(platformdirs.user_cache_dir(APPLICATION))
        if path.is_absolute():
            return path
    return _replacement or _replace("the user has no home folder for the cache")


def folder() -> Path:
    """Returns the folder of compiled kernels; it may not exist."""
    return root() / FOLDER


def why_untrusted(path: Path) -> str | None:
    """Returns why a file or folder must not be used, or None.

    A folder may be a link, because a user may move the cache; a file may not.
    """
    if path.is_symlink() and not path.is_dir():
        return f"{path} is a link, expected a file of the cache"
    above = [*path.parents]
    if (cache := root()) in above:
        above = above[: above.index(cache) + 1]
    else:
        above = above[: not path.is_dir()]
    return next(filter(None, map(_why_unusable, (path, *above))), None)


def _why_unusable(path: Path) -> str | None:
    status = os.stat(path)
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        return f"{path} is neither a folder nor a regular file"
    if status.st_uid != os.geteuid():
        return (
            f"{path} belongs to the user {status.st_uid}, expected "
            f"{os.geteuid()}, who runs this process"
        )
    if status.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        return (
            f"{path} can be written by other users (mode {mode:04o}): run chmod go-w "
            f"{path}"
        )
    return None


def find(file_name: str) -> Path | None:
    """Returns the path of a stored file if it exists and is trusted, or None."""
    folders = [folder()] if _replacement is None else [_replacement, folder()]
    for parent in folders:
        try:
            if why_untrusted(parent / file_name) is None:
                return parent / file_name
        except OSError:
            continue
    return None


def write(folder: Path, file_name: str, content: bytes) -> Path:
    """Writes a file that only this user can read and write, and returns its path.

    The file is replaced atomically.
    """
    # `parents=True` would create the parents with the mode of the umask.
    for path in (*reversed(folder.parents), folder):
        path.mkdir(mode=0o700, exist_ok=True)
    if reason := why_untrusted(folder):
        raise PermissionError(reason)
    handle, temporary = tempfile.mkstemp(suffix=".new", dir=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, folder / file_name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return folder / file_name


def store(file_name: str, content: bytes) -> Path:
    """Stores a file and returns its path.

    If the user's cache cannot be written to or is not trusted, the file is written to a
    temporary folder that is removed when the process ends. A warning is given once per
    process.
    """
    if _replacement is not None:
        return write(_replacement, file_name, content)
    try:
        return write(folder(), file_name, content)
    except OSError as error:
        replacement = _replace(f"the cache {folder()} cannot be used: {error}")
        return write(replacement, file_name, content)


def _replace(reason: str) -> Path:
    """Creates the temporary folder that replaces the cache, and says so."""
    global _replacement
    _replacement = Path(tempfile.mkdtemp(prefix="mlx_marlin-"))
    atexit.register(_remove, _replacement, os.getpid())
    warnings.warn(
        f"metal_emulator: {reason}; {_replacement} replaces it until this process ends",
        RuntimeWarning,
        stacklevel=3,
    )
    return _replacement


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
