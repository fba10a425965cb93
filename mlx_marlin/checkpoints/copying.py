"""Copies files of a checkpoint, and nothing that links of it lead to elsewhere."""

import os
import shutil
from pathlib import Path

from mlx_marlin import regular_files

BLOBS = Path("..", "..", "blobs")
"""Where the snapshots of the Hugging Face Hub's cache have their files, as links."""


def copy_within(file: Path, target: Path) -> None:
    """Copies a file of a checkpoint."""
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
