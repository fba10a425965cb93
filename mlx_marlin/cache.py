"""The cache folder of the user, for files that can be recreated.

A file is ignored if it, its folder or the package's root belongs to another user or can
be written by other users. Modules that only these need are imported inside functions,
because a first product imports this one. The emulator has a cache of its own.
"""

import fnmatch
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from mlx_marlin import regular_files

LONGEST_WAIT = 5.0
"""Seconds that a process waits in vain for other processes' locks in a folder."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_waited_in: set[Path] = set()
"""Folders in which this process has waited for locks as long as it may."""


class LockedError(OSError):
    """Another process holds a lock, and does not release it."""


def root() -> Path:
    """Returns the package's folder in the user's cache; it may not exist.

    A user without a home, as in some containers, has a private temporary folder.
    """
    import platformdirs

    with suppress(RuntimeError):
        path = Path(platformdirs.user_cache_dir("mlx_marlin"))
        if path.is_absolute():
            return path
    from metal_emulator import cache  # a folder for both packages, told once

    return cache.root()


def folder(name: str) -> Path:
    """Returns a folder of the package in the user's cache; it may not exist."""
    return root() / name


def why_untrusted(path: Path) -> str | None:
    """Returns why a file or folder of the cache must not be used, or None.

    Other users may have written it, or it is neither a folder nor a regular file. A
    folder may be a link, because a user may move the cache; a file may not. The
    folder of a file is checked as well, and so are all folders up to the package's
    root.
    """
    if path.is_symlink() and not path.is_dir():
        return f"{path} is a link, expected a file of the cache"
    above = [*path.parents]
    if (package_root := root()) in above:
        above = above[: above.index(package_root) + 1]
    else:
        above = above[: not path.is_dir()]
    return next(filter(None, map(_why_unusable, (path, *above))), None)


def _why_unusable(path: Path) -> str | None:
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode) and (
        reason := regular_files.why_irregular(status)
    ):
        return f"{path} is {reason}"
    if reason := _why_not_own(path, status):
        return reason
    if status.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        return (
            f"{path} can be written by other users (mode {mode:04o}): run chmod go-w "
            f"{path}"
        )
    return None


def _why_not_own(path: Path, status: os.stat_result) -> str | None:
    if status.st_uid == os.geteuid():
        return None
    return (
        f"{path} belongs to the user {status.st_uid}, expected {os.geteuid()}, who "
        f"runs this process"
    )


def make(folder: Path) -> None:
    """Creates a folder that only this user can read and write, if it is missing."""
    # `parents=True` would create the parents with the mode of the umask.
    for path in (*reversed(folder.parents), folder):
        path.mkdir(mode=0o700, exist_ok=True)
    if reason := why_untrusted(folder):
        raise PermissionError(reason)


def open_to_write(file: Path) -> BinaryIO:
    """Opens a file to read, change or lock it; creates it if it is missing."""
    try:
        return regular_files.open_file(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except ValueError as error:
        raise OSError(str(error)) from None


@contextmanager
def locked(file: Path) -> Iterator[BinaryIO]:
    """Opens a file as `open_to_write` does, and locks it against other processes.

    Where the file system has no locks, the file is open without one.
    """
    with open_to_write(file) as opened:
        _lock(opened, file)
        yield opened


def _lock(opened: BinaryIO, file: Path) -> None:
    import fcntl
    import time

    end = time.monotonic() + (0 if file.parent in _waited_in else LONGEST_WAIT)
    while True:
        try:
            return fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                _waited_in.add(file.parent)
                raise LockedError(f"{file} is locked by another process") from None
            time.sleep(0.02)
        except OSError:
            return None


def read_json(file: Path) -> Any:
    """Returns the content of a JSON file of the cache."""
    import json

    if reason := why_untrusted(file):
        raise PermissionError(reason)
    content = regular_files.read(file)
    with regular_files.decoding():
        return json.loads(content)


def write(folder: Path, file_name: str, content: bytes) -> Path:
    """Writes a file that only this user can read and write, and returns its path.

    The file is replaced atomically.
    """
    import tempfile

    file = folder / file_name
    make(folder)
    handle, temporary = tempfile.mkstemp(suffix=".new", dir=folder)
    try:
        with regular_files.named(file), os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return file


def sizes(path: str | Path, within: int | None = None) -> list[int]:
    """Returns the size of each file in a folder and its subfolders.

    Links count as files. There are none in a folder that is a link or is missing.
    """
    found: list[int] = []
    with suppress(OSError):
        for _, _, _, folder in os.fwalk(path, dir_fd=within):
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):  # removed by another process
                    if not entry.is_dir(follow_symlinks=False):
                        found.append(entry.stat(follow_symlinks=False).st_size)
    return found


def remove(name: str, within: int) -> int:
    """Removes a file or a folder of an open folder; returns the number of files.

    Of a link, the link alone is removed. What cannot be removed, in a folder, stays.
    """
    import shutil

    try:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=within).st_mode):
            os.unlink(name, dir_fd=within)
            return 1
    except FileNotFoundError:  # removed by another process
        return 0
    before = len(sizes(name, within))
    shutil.rmtree(name, ignore_errors=True, dir_fd=within)
    return before - len(sizes(name, within))


def clear(within: int, pattern: str = "*") -> int:
    """Removes what an open folder has under matching names, as `remove` does."""
    names = fnmatch.filter(os.listdir(within), pattern)
    return sum(remove(name, within) for name in names)


@contextmanager
def own(folder: Path) -> Iterator[int]:
    """Opens a folder of this user, to remove entries wherever its path leads later."""
    if folder.is_symlink() or not folder.is_dir():
        kind = "a link, which is not followed" if folder.is_symlink() else "a file"
        raise ValueError(f"{folder} is {kind}, expected a folder")
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if reason := _why_not_own(folder, os.fstat(opened)):
            raise PermissionError(reason)
        yield opened
    finally:
        os.close(opened)


def find(name: str, file_name: str) -> Path | None:
    """Returns the path of a stored file if it exists and is trusted, or None."""
    path = folder(name) / file_name
    try:
        return path if why_untrusted(path) is None else None
    except OSError:
        return None
