"""Removes files of this user's folders; a link is removed, and never followed."""

import fnmatch
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def opened(
    path: str | Path, within: int | None = None, *, any_owner: bool = False
) -> Iterator[int]:
    """Opens a folder whose entries are to be removed."""
    status = os.lstat(path, dir_fd=within)
    if not stat.S_ISDIR(status.st_mode):
        kind = "a link, which is not followed" if stat.S_ISLNK(status.st_mode) else ""
        raise ValueError(f"{path} is {kind or 'a file'}, expected a folder")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    descriptor = os.open(path, flags, dir_fd=within)
    try:
        owner = os.fstat(descriptor).st_uid
        if not any_owner and owner != os.geteuid():
            raise PermissionError(
                f"{path} belongs to the user {owner}, expected {os.geteuid()}, who "
                f"runs this process"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def entries(folder: int, pattern: str = "*") -> list[tuple[os.stat_result, str]]:
    """Returns status and name of the entries of an open folder; links stay links."""
    found = []
    for name in fnmatch.filter(os.listdir(folder), pattern):
        with suppress(FileNotFoundError):  # removed by another process
            found.append((os.lstat(name, dir_fd=folder), name))
    return found


def sizes(path: str | Path, within: int | None = None) -> list[int]:
    """Returns the size of each file in a folder and its subfolders.

    Links count as files. There are none in a folder that is a link or is missing.
    """
    found = []
    with suppress(OSError):
        for _, _, _, descriptor in os.fwalk(path, dir_fd=within):
            found += [
                status.st_size
                for status, _ in entries(descriptor)
                if not stat.S_ISDIR(status.st_mode)
            ]
    return found


def remove(name: str, folder: int) -> int:
    """Removes an entry of an open folder, and returns the number of files removed.

    What cannot be removed, in a folder that is an entry, stays.
    """
    try:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            os.unlink(name, dir_fd=folder)
            return 1
    except FileNotFoundError:
        return 0
    before = len(sizes(name, folder))
    shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
    return before - len(sizes(name, folder))


def remove_matching(pattern: str, folder: int) -> int:
    """Removes the entries of an open folder whose names match; returns the files."""
    return sum(remove(name, folder) for _, name in entries(folder, pattern))
