"""`mlx-marlin cache`: lists, limits and clears the package's cache."""

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

KERNELS = {"emulator": "*.so", "kernels": "*.cubin"}
"""Names of the folders that `--limit` applies to, and pattern of their files."""
CONTENTS = {
    "emulator": "kernels compiled for the emulator",
    "gpus": "measured figures of CUDA devices",
    "kernels": "compiled CUDA kernels",
    "models": "settings of optimize that mlx-marlin tune found",
    "tuned": "results of mlx-marlin tune",
    "verdicts": "checks of kernels on this machine",
}
"""Description of a folder, by name. Other folders are listed without one."""
ALL = ""
"""Value of `--clear` without a name."""
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)")
LEFTOVER = re.compile(rf"{re.escape(cache.TEMPORARY_PREFIX)}(\d+)-\w+")
"""Name of a temporary folder, with the ID of its process."""
MIN_AGE = 3600
"""Seconds since its last change after which a temporary folder may be removed."""

EPILOG = """
All files of the cache can be recreated, so it is always safe to remove them. The
command also removes temporary folders of killed processes that are older than an hour.

examples:
  mlx-marlin cache --limit 500MB
  mlx-marlin cache --clear emulator
"""


@dataclass(frozen=True)
class CacheFolder:
    """A folder of the cache.

    Attributes:
        name: Name of the folder.
        path: Path of the folder.
        contents: Description of its contents, or "".
        files: Number of files, including those in subfolders.
        bytes: Total size of the files.
        untrusted: Why the folder is not used, or None.
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
        description="List the files in the package's cache.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--limit",
        metavar="SIZE",
        help="remove the least recently used compiled kernels until the others take "
        "at most SIZE, such as 500MB or 2GiB",
    )
    action.add_argument(
        "--clear",
        nargs="?",
        const=ALL,
        metavar="NAME",
        help="remove the folder NAME, or all folders",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Removes files if requested, and lists the cache."""
    removed = _remove_files(args)
    leftovers = remove_leftovers()
    if args.json:
        print(_as_json(cache_folders(), removed or 0, leftovers))
        return 0
    if removed is not None:
        print(f"files removed: {removed}")
    if leftovers:
        print(f"leftover temporary folders removed: {leftovers}")
    print(listing(cache_folders()))
    return 0


def _remove_files(args: argparse.Namespace) -> int | None:
    """Applies `--clear` or `--limit`; returns the removed files, None without both."""
    if args.clear is not None:
        return clear(args.clear)
    if args.limit is not None:
        return shrink(size(args.limit))
    return None


def _as_json(folders: Iterable[CacheFolder], removed: int, leftovers: int) -> str:
    data = {
        "root": str(cache.root()),
        "folders": [asdict(folder) for folder in folders],
        "removed_files": removed,
        "removed_leftovers": leftovers,
    }
    return json.dumps(data, indent=1)


def size(text: str) -> int:
    """Parses a size such as 500MB, 1.5 GiB or 4096.

    Raises:
        ValueError: If it is not a size.
    """
    found = SIZE.fullmatch(text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(f"--limit {text!r}, expected a size such as 500MB or 2GiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def cache_folders() -> list[CacheFolder]:
    """Returns the folders of the cache, sorted by name."""
    return [_describe(path) for path in _folders()]


def listing(folders: Iterable[CacheFolder]) -> str:
    """Returns the folders of the cache as text, one per line."""
    lines = [f"{cache.root()}:"]
    for folder in folders:
        lines.append(
            f"  {folder.name:<10} {folder.files:>6} files "
            f"{_format_bytes(folder.bytes):>9}  {folder.contents}".rstrip()
        )
        if folder.untrusted:
            lines.append(f"    not used: {folder.untrusted}")
    return "\n".join(lines if lines[1:] else [f"{cache.root()}: nothing"])


def clear(name: str) -> int:
    """Removes one folder of the cache or all, and returns the number of files removed.

    Args:
        name: Name of the folder, or `ALL`.

    Raises:
        ValueError: If there is no folder of that name.
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
        with suppress(OSError):  # a symbolic link to a folder is kept
            path.rmdir()
    with suppress(OSError):  # not empty
        cache.root().rmdir()
    return removed


def shrink(limit: int) -> int:
    """Removes the least recently used compiled kernels and returns their number.

    The modification time of a kernel's file is that of its last use.

    Args:
        limit: Maximum bytes of the remaining kernels.
    """
    files = [
        file
        for name, pattern in KERNELS.items()
        for file in _files(cache.folder(name), pattern)
    ]
    removed = 0
    total = 0
    for status, path in sorted(files, key=_last_use, reverse=True):
        total += status.st_size
        if total > limit:
            path.unlink(missing_ok=True)
            removed += 1
    return removed


def remove_leftovers() -> int:
    """Removes the temporary folders of killed processes, and returns their number."""
    candidates = [
        *Path(tempfile.gettempdir()).glob(f"{cache.TEMPORARY_PREFIX}*"),
        *(path for folder in _folders() for path in folder.glob("tmp*")),
    ]
    leftovers = [path for path in candidates if _is_leftover(path)]
    for path in leftovers:
        _remove(path)
    return len(leftovers)


def _is_leftover(path: Path) -> bool:
    """Returns whether a temporary folder is this user's, old, and not in use."""
    try:
        status = path.lstat()
    except OSError:
        return False
    if status.st_uid != os.geteuid() or time.time() - status.st_mtime < MIN_AGE:
        return False
    if path.parent.parent == cache.root():
        return True  # an unfinished file or a build folder
    found = LEFTOVER.fullmatch(path.name)
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


def _describe(path: Path) -> CacheFolder:
    files = _files(path)
    return CacheFolder(
        name=path.name,
        path=str(path),
        contents=CONTENTS.get(path.name, ""),
        files=len(files),
        bytes=sum(status.st_size for status, _ in files),
        untrusted=cache.why_untrusted(path),
    )


def _files(folder: Path, pattern: str = "*") -> list[tuple[os.stat_result, Path]]:
    """Returns the files in a folder and its subfolders, with their status."""
    return [*_with_status(path for path in folder.rglob(pattern) if path.is_file())]


def _with_status(paths: Iterable[Path]) -> Iterator[tuple[os.stat_result, Path]]:
    for path in paths:
        with suppress(OSError):  # removed by another process
            yield path.stat(), path


def _last_use(file: tuple[os.stat_result, Path]) -> float:
    return file[0].st_mtime


def _format_bytes(count: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
