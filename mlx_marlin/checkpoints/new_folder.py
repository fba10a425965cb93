"""A folder that appears under its name when it is complete."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mlx_marlin import cache


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Makes `.NAME.partial` beside a path, and renames it to NAME after the block.

    If the block raises, the folder is removed, with the parents that were made for it.
    A folder that a killed process left is emptied and used again.
    """
    if path.exists():
        raise ValueError(f"{path} exists, expected the name of a new folder")
    partial = path.with_name(f".{path.name}.partial")
    with ExitStack() as stack:
        stack.enter_context(_parents(partial))
        partial.mkdir(exist_ok=True)
        cache.check_own(partial)
        stack.callback(os.close, opened := os.open(partial, os.O_RDONLY))
        _lock(opened, partial)
        try:
            cache.clear(partial)
            yield partial
            partial.rename(path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Makes the parents of a path, and removes those again if the block raises."""
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):  # another process may have put a file there
            for folder in missing:
                folder.rmdir()
        raise


def _lock(opened: int, partial: Path) -> None:
    """Locks an open folder; the lock ends with the process."""
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(opened), partial.stat()):
            return
    raise ValueError(f"{partial}: another process is writing this folder")
