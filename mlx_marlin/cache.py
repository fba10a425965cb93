"""The cache folder of the user, for files that can be recreated.

A file is ignored if it, its folder or the package's root belongs to another user or can
be written by other users. Modules that only these need are imported inside functions,
because a first product imports this one. The emulator has a cache of its own.
"""

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

    make(folder)
    handle, temporary = tempfile.mkstemp(suffix=".new", dir=folder)
    try:
        with (
            regular_files.named(folder / file_name),
            os.fdopen(handle, "wb") as stream,
        ):
            stream.write(content)
        os.replace(temporary, folder / file_name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return folder / file_name


def sizes(path: Path) -> list[int]:
    """Returns the size of each file in a folder and its subfolders.

    Links count as files. There are none in a folder that is a link or is missing.
    """
    found: list[int] = []
    with suppress(OSError):
        for _, _, _, folder in os.fwalk(path):
            found += [
                entry.stat(follow_symlinks=False).st_size
                for entry in os.scandir(folder)
                if not entry.is_dir(follow_symlinks=False)
            ]
    return found


def remove(path: Path) -> int:
    """Removes a file or a folder, and returns the number of files removed.

    Of a link, the link alone is removed. What cannot be removed, in a folder, stays.
    """
    import shutil

    if path.is_symlink() or not path.is_dir():
        try:
            path.unlink()
        except FileNotFoundError:  # removed by another process
            return 0
        return 1
    before = len(sizes(path))
    shutil.rmtree(path, ignore_errors=True)
    return before - len(sizes(path))


def clear(folder: Path, pattern: str = "*") -> int:
    """Removes what a folder has under matching names; returns the number of files."""
    check_own(folder)
    return sum(map(remove, [*folder.glob(pattern)]))


def check_own(folder: Path) -> None:
    """Checks that a folder whose entries are to be removed is this user's."""
    if folder.is_symlink() or not folder.is_dir():
        kind = "a link, which is not followed" if folder.is_symlink() else "a file"
        raise ValueError(f"{folder} is {kind}, expected a folder")
    if reason := _why_not_own(folder, folder.stat()):
        raise PermissionError(reason)


def find(name: str, file_name: str) -> Path | None:
    """Returns the path of a stored file if it exists and is trusted, or None."""
    path = folder(name) / file_name
    try:
        return path if why_untrusted(path) is None else None
    except OSError:
        return None
