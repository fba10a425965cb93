"""`mlx-marlin cache`: lists, limits and clears the files that the package keeps."""

import argparse
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mlx_marlin import cache

KERNELS = "emulator"
"""Name of the folder that `--limit` is for."""
CONTENTS = {
    KERNELS: "kernels compiled for the emulator",
    "gpus": "measured figures of CUDA devices",
    "tuned": "results of mlx-marlin tune",
    "verdicts": "checks of kernels on this machine",
}
"""Name of a folder -> what it keeps. Folders of other names are listed too."""
ALL = ""
"""What `--clear` without a name means."""
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)")
LEFT_OVER = re.compile(rf"{re.escape(cache.TEMPORARY_PREFIX)}(\d+)-\w+")
"""Name of a temporary folder, with the number of its process."""
OLD_SECONDS = 3600
"""A temporary folder that was changed later may still be in use."""

EPILOG = """
Everything listed can be made again, so it is always safe to remove it. Each call also
removes temporary folders that killed processes left behind more than an hour ago.

examples:
  mlx-marlin cache --limit 500MB
  mlx-marlin cache --clear emulator
"""


@dataclass(frozen=True)
class Kept:
    """A folder of the cache.

    Attributes:
        name: Its name.
        path: Where it is.
        contents: What it keeps, empty if that is not known.
        files: How many files there are, folders below included.
        bytes: Their size.
        untrusted: Why it is not used, or None.
    """

    name: str
    path: str
    contents: str
    files: int
    bytes: int
    untrusted: str | None


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Adds the command's arguments."""
    parser = subparsers.add_parser(
        "cache",
        description="List the files that the package keeps in the user's cache folder.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--limit",
        metavar="SIZE",
        help="remove the compiled kernels that were not used for longest, until the "
        "others take at most SIZE, such as 500MB or 2GiB",
    )
    action.add_argument(
        "--clear",
        nargs="?",
        const=ALL,
        metavar="NAME",
        help="remove one folder, or all of them",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Removes what the arguments ask for, and lists what is left."""
    limit = None if args.limit is None else size(args.limit)
    if args.clear is not None:
        removed = clear(args.clear)
    elif limit is not None:
        removed = shrink(cache.folder(KERNELS), limit)
    else:
        removed = None
    leftovers = remove_leftovers()
    folders = kept()
    if args.json:
        data = {
            "root": str(cache.root()),
            "folders": [asdict(folder) for folder in folders],
            "removed_files": removed or 0,
            "removed_leftovers": leftovers,
        }
        print(json.dumps(data, indent=1))
        return 0
    if removed is not None:
        print(f"files removed: {removed}")
    if leftovers:
        print(f"leftover temporary folders removed: {leftovers}")
    print(listing(folders))
    return 0


def size(text: str) -> int:
    """Returns the bytes that a size such as 500MB, 1.5 GiB or 4096 names.

    Raises:
        ValueError: If it is not a size.
    """
    found = SIZE.fullmatch(text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(f"--limit {text!r}, expected a size such as 500MB or 2GiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def kept() -> list[Kept]:
    """Returns the folders of the cache, sorted by name."""
    return [_kept(path) for path in _folders()]


def listing(folders: Iterable[Kept]) -> str:
    """Describes the folders of the cache, one a line."""
    lines = [f"{cache.root()}:"]
    for folder in folders:
        lines.append(
            f"  {folder.name:<10} {folder.files:>6} files {_shown(folder.bytes):>9}  "
            f"{folder.contents}".rstrip()
        )
        if folder.untrusted:
            lines.append(f"    not used: {folder.untrusted}")
    return "\n".join(lines if lines[1:] else [f"{cache.root()}: nothing"])


def clear(name: str) -> int:
    """Removes a folder of the cache, or all, and returns how many files there were.

    Args:
        name: The folder's name, `ALL` for all folders.

    Raises:
        ValueError: If there is no such folder.
    """
    folders = {path.name: path for path in _folders()}
    if name != ALL and name not in folders:
        known = ", ".join(folders) or "nothing to remove"
        raise ValueError(f"--clear {name!r}, expected a folder of the cache: {known}")
    removed = 0
    for path in folders.values() if name == ALL else [folders[name]]:
        removed += len(_files(path))
        for entry in path.iterdir():
            _remove(entry)
        with suppress(OSError):  # a link to a folder elsewhere stays
            path.rmdir()
    with suppress(OSError):  # not empty
        cache.root().rmdir()
    return removed


def shrink(folder: Path, limit: int) -> int:
    """Removes libraries, the least recently used first; returns how many.

    Args:
        folder: A folder of libraries that have the time of their last use.
        limit: Bytes that the other libraries may take.
    """
    removed = 0
    total = 0
    for status, path in sorted(_files(folder, "*.so"), key=_last_use, reverse=True):
        total += status.st_size
        if total > limit:
            path.unlink(missing_ok=True)
            removed += 1
    return removed


def remove_leftovers() -> int:
    """Removes the temporary folders of killed processes, and returns how many."""
    candidates = [
        *Path(tempfile.gettempdir()).glob(f"{cache.TEMPORARY_PREFIX}*"),
        *(path for folder in _folders() for path in folder.glob("tmp*")),
    ]
    leftovers = [path for path in candidates if _is_left_over(path)]
    for path in leftovers:
        _remove(path)
    return len(leftovers)


def _is_left_over(path: Path) -> bool:
    """Whether a temporary folder is this user's, old, and not in use."""
    try:
        status = path.lstat()
    except OSError:
        return False
    if status.st_uid != os.geteuid() or time.time() - status.st_mtime < OLD_SECONDS:
        return False
    if path.parent.parent == cache.root():
        return True  # an unfinished file, or a folder in which a kernel was built
    found = LEFT_OVER.fullmatch(path.name)
    return found is not None and not _is_running(int(found[1]))


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _folders() -> list[Path]:
    root = cache.root()
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir())


def _kept(path: Path) -> Kept:
    files = _files(path)
    return Kept(
        name=path.name,
        path=str(path),
        contents=CONTENTS.get(path.name, ""),
        files=len(files),
        bytes=sum(status.st_size for status, _ in files),
        untrusted=cache.why_untrusted(path),
    )


def _files(folder: Path, pattern: str = "*") -> list[tuple[os.stat_result, Path]]:
    """Returns the files below a folder with their status."""
    return [*_with_status(path for path in folder.rglob(pattern) if path.is_file())]


def _with_status(paths: Iterable[Path]) -> Iterator[tuple[os.stat_result, Path]]:
    for path in paths:
        with suppress(OSError):  # another process has removed it
            yield path.stat(), path


def _last_use(file: tuple[os.stat_result, Path]) -> float:
    return file[0].st_mtime


def _shown(count: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
