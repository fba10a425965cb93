"""A value in a file of the cache, which is not there if the file is not valid."""

from pathlib import Path
from typing import TypeVar

from mlx_marlin import cache, regular_files
from mlx_marlin.evidence import codec
from mlx_marlin.warn_once import warn_once

Value = TypeVar("Value")


def read(file: Path, type_: type[Value], name: str) -> Value | None:
    """Returns the value of a file; None if there is none, or others may have written
    it, and with one warning, which names the value, if it is damaged."""
    try:
        data = cache.read_json(file)
        with regular_files.decoding():
            found: Value = codec.decoded(type_, data)
            return found
    except OSError:
        pass
    except ValueError as error:
        warn_once(f"{name} in {file}", f"{name} in {file} is ignored: {error}")
    return None
