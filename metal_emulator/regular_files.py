"""Reads files that others may have written: regular ones of a bounded size.

Reading a FIFO can wait for ever, and reading a device can have no end.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 100_000_000
"""Largest text that is read."""
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device"}


def open_file(path: str | Path) -> BinaryIO:
    """Opens a regular file for reading."""
    # Opening a FIFO without O_NONBLOCK waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = _KINDS.get(stat.S_IFMT(mode), "no file")
    raise ValueError(f"{path}: {kind}, expected a regular file")


def read(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Returns the content of a file."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise ValueError(f"{path}: {size} bytes, expected at most {most_bytes}")
        return file.read(size)  # no more, if the file grows meanwhile


def read_text(path: str | Path) -> str:
    """Returns the content of a file in UTF-8."""
    try:
        return read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} is not UTF-8, expected a text in UTF-8"
        ) from None
