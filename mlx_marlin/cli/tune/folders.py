"""Whether the results of `mlx-marlin tune` can be kept."""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any


def check_writable(folder: Path, prepare: Callable[[Path], Any]) -> None:
    """Checks before the measurements, which take minutes, that results can be kept.

    Args:
        folder: The folder of the results.
        prepare: Creates it, and may return a context to write files in.

    Raises:
        OSError: If the folder cannot be written to, or is not trusted.
    """
    try:
        with prepare(folder) or nullcontext():
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            f"the results cannot be kept in {folder}: {error.strerror or error}"
        ) from error
