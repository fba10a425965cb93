"""Reads files that others may have written, and names the files that it cannot write.

Only regular files of a bounded size are read.

Reading a FIFO can wait for ever, and reading a device can have no end. Links are
followed, because the cache of the Hugging Face Hub consists of links to its blobs; what
they lead to has to be a regular file too.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

LARGEST_JSON = 100_000_000
"""Bytes of a JSON file that is read; vocabularies are the largest ones."""
MOST_QUOTED = 200
"""Letters of a file's content that a message shows."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def quoted(value: object, most: int = MOST_QUOTED) -> str:
    """Returns what a message shows of a value from a file, on one line."""
    return short(repr(value), most)


def short(text: str, most: int = MOST_QUOTED) -> str:
    """Returns a text, or its beginning and its length, in at most `most` letters."""
    if len(text) <= most:
        return text
    length = f"... ({len(text)} letters)"
    return text[: most - len(length)] + length


def open_file(path: str | Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """Opens a file for reading, or for reading and writing."""
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
    """Returns the content of a file."""
    with open_file(path) as file:
        status = os.fstat(file.fileno())
        _check_size(path, status, most_bytes)
        return file.read(status.st_size)  # no more, if the file grows meanwhile


def read_text(path: str | Path) -> str:
    """Returns the content of a file in UTF-8."""
    try:
        return read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} is not UTF-8, expected a text in UTF-8"
        ) from None


@contextmanager
def decoding() -> Iterator[None]:
    """Raises any error in decoding a file's content as a ValueError of one line.

    Content that others may have written can lead to an error of any type: a list where
    a mapping is expected has no `items`, and an integer can be too large to divide.
    """
    try:
        yield
    except MemoryError:  # of this process, and not the content's fault
        raise
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        (line, *_) = f"{kind}{error}".splitlines() or [""]
        raise ValueError(short(line)) from error


def check(path: str | Path, most_bytes: int | None = None) -> None:
    """Checks a file that a library will open by its name.

    `most_bytes`: the largest size; None if it has no bound.
    """
    status = os.stat(path)
    if reason := why_irregular(status):
        raise ValueError(f"{path}: {reason}")
    if most_bytes is not None:
        _check_size(path, status, most_bytes)


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Adds a file to an OSError that names none, such as that of a full device."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write(path: Path, text: str) -> None:
    """Writes a file in UTF-8."""
    with named(path):
        path.write_text(text, encoding="utf-8")


def why_irregular(status: os.stat_result) -> str | None:
    """Returns why a file is not a regular one, or None."""
    if stat.S_ISREG(status.st_mode):
        return None
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "of an unknown kind")
    return f"{kind}, expected a regular file"


def _check_size(path: str | Path, status: os.stat_result, most_bytes: int) -> None:
    if status.st_size > most_bytes:
        raise ValueError(
            f"{path}: {status.st_size} bytes, expected at most {most_bytes}"
        )
