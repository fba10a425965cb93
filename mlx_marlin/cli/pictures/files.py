"""Files that options of the command line write."""

import os
from collections.abc import Sequence
from pathlib import Path

PICTURES = (".svg", ".png")
"""Suffixes of pictures."""


def check(path: Path, option: str, suffixes: Sequence[str] = PICTURES) -> None:
    """Checks that a file can be written."""
    if path.suffix.lower() not in suffixes:
        *others, last = suffixes
        raise ValueError(
            f"{option} {path}: expected a name that ends in {', '.join(others)} or "
            f"{last}"
        )
    check_folder(path, option)


def check_folder(path: Path, option: str) -> None:
    """Checks that a file can be written, whatever its suffix."""
    if not path.parent.is_dir():
        raise ValueError(
            f"{option} {path}: the folder {path.parent} does not exist, expected a "
            f"file in an existing folder"
        )
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a folder, expected a file")


def write(path: Path, option: str, content: bytes) -> None:
    """Writes a file, whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise OSError(
            f"{option} {path}: cannot be written ({error.strerror}), expected a file "
            f"in a folder that you may write to"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
