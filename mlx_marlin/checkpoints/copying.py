"""Copies files of a checkpoint, and nothing that links of it lead to elsewhere."""

import os
import shutil
from pathlib import Path

from mlx_marlin import regular_files

BLOBS = Path("..", "..", "blobs")
"""Where the snapshots of the Hugging Face Hub's cache have their files, as links."""


def copy_within(file: Path, target: Path) -> None:
    """Copies a file of a checkpoint.

    Args:
        file: The file. If it is a link, it leads to a file of the same folder, or to
            the blobs of the Hugging Face Hub's cache that the folder belongs to.
        target: The file to make; it must not exist.

    Raises:
        OSError: If it cannot be read or written.
        ValueError: If it leads elsewhere, or is not a regular file.
    """
    real = Path(os.path.realpath(file))
    folder = Path(os.path.realpath(file.parent))
    homes = [folder]
    if folder.parent.name == "snapshots":
        homes.append(Path(os.path.realpath(folder / BLOBS)))
    if real.parent not in homes:
        raise ValueError(
            f"{file} is a link to {real}, which is not copied: expected a file of the "
            f"same folder"
        )
    with (
        regular_files.named(target),
        regular_files.open_file(real, os.O_NOFOLLOW) as source,
        target.open("xb") as copy,
    ):
        shutil.copyfileobj(source, copy)
