"""Opens files that others may have written: regular files of a bounded size only.

Reading a FIFO can wait for ever, and reading a device can have no end. Links are
followed, because the cache of the Hugging Face Hub consists of links to its blobs; what
they lead to has to be a regular file too.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

LARGEST_JSON = 100_000_000
"""Bytes of a JSON file that is read; vocabularies are the largest ones."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_file(path: str | Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """Opens a file for reading, or for reading and writing.

    Args:
        path: The file.
        flags: Flags of `os.open`. A file that they create is the user's alone.

    Raises:
        OSError: If the file cannot be opened.
        ValueError: If it is not a regular file; the message names it.
    """
    # Opening a FIFO without O_NONBLOCK waits for a writer.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    try:
        if reason := why_irregular(os.fstat(descriptor)):
            raise ValueError(f"{path}: {reason}")
        return os.fdopen(descriptor, "r+b" if flags & os.O_RDWR else "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read(path: str | Path, most_bytes: int = LARGEST_JSON) -> bytes:
    """Returns the content of a file.

    Args:
        path: The file.
        most_bytes: The largest size.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not a regular file, or larger; the message names the file,
            its size and the bound.
    """
    with open_file(path) as file:
        size = _bounded_size(path, file, most_bytes)
        return file.read(size)  # no more, if the file grows meanwhile


def check(path: str | Path, most_bytes: int = LARGEST_JSON) -> None:
    """Checks a file that a library will open by its name.

    Raises:
        OSError: As for `read`.
        ValueError: As for `read`.
    """
    with open_file(path) as file:
        _bounded_size(path, file, most_bytes)


def why_irregular(status: os.stat_result) -> str | None:
    """Returns why a file is not a regular one, or None.

    Args:
        status: Status of the file, links followed.
    """
    if stat.S_ISREG(status.st_mode):
        return None
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "of an unknown kind")
    return f"{kind}, expected a regular file"


def _bounded_size(
    path: str | Path, file: BinaryIO, most_bytes: int = LARGEST_JSON
) -> int:
    size = os.fstat(file.fileno()).st_size
    if size > most_bytes:
        raise ValueError(f"{path}: {size} bytes, expected at most {most_bytes}")
    return size
