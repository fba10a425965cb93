"""`mlx-marlin cache`: lists, limits and clears the package's cache."""

import argparse
import fnmatch
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_marlin import cache, tables
from mlx_marlin.cli import output

CONTENTS = {
    "emulator": "kernels compiled for the emulator",
    "gpus": "measured figures of CUDA devices",
    "kernels": "compiled CUDA kernels",
    "models": "results of earlier versions, which are not used",
    "tuned": "measured times of this machine",
    "verdicts": "checks of kernels on this machine",
}
"""Description of a folder, by name. Other folders are listed without one."""


KERNELS = {"emulator": "*.so", "kernels": "*.cubin"}
"""Names of the folders that `--limit` applies to, and pattern of their files."""
ALL = ""
"""Value of `--clear` without a name."""
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)")

DESCRIPTION = "List the files in the package's cache."
EPILOG = """
All files of the cache can be recreated, so it is always safe to remove them. Those that
a killed process left unfinished, tmp*.new, are removed by --clear only.

examples:
  mlx-marlin cache --limit 500MB
  mlx-marlin cache --clear emulator
  mlx-marlin cache --forget marlin_gemv
"""


@dataclass(frozen=True)
class CacheFolder:
    """A folder of the cache."""

    name: str  # Name of the folder
    path: str  # Path of the folder
    contents: str  # Description of its contents, or ""
    files: int  # Number of files, including those in subfolders
    bytes: int  # Total size of the files
    rights: str | None  # Its access rights; None if it does not exist
    problem: str | None  # Why it cannot be used, or None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
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
    action.add_argument(
        "--forget",
        metavar="KERNEL",
        help="remove the verdicts on KERNEL, so that it is checked again",
    )
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Removes files if requested, and lists the cache."""
    removed = _remove_files(args)
    folders = listed()
    facts = {
        "root": str(cache.root()),
        "folders": [asdict(folder) for folder in folders],
        "removed_files": removed or 0,
    }
    output.write_json(args, facts)
    if removed is not None:
        print(f"{'files' if args.forget is None else 'verdicts'} removed: {removed}")
    print(listing(folders))
    if args.limit is not None and (reason := _above(size(args.limit), folders)):
        print(reason)
    return 0


def _above(limit: int, folders: Iterable[CacheFolder]) -> str | None:
    """Returns why the cache is larger than a limit, or None if it is not."""
    total = sum(folder.bytes for folder in folders)
    if total <= limit:
        return None
    return (
        f"{size_text(total)} are left, more than {size_text(limit)}: --limit "
        f"removes compiled kernels ({' and '.join(KERNELS)}), --clear NAME removes "
        f"other folders"
    )


def _remove_files(args: argparse.Namespace) -> int | None:
    """Applies the option that removes files; returns their number, None without one."""
    if args.clear is not None:
        return clear(args.clear)
    if args.limit is not None:
        return shrink(size(args.limit))
    if args.forget is None:
        return None
    from mlx_marlin.guard import verdicts

    try:
        return verdicts.forget(args.forget)
    except ValueError as error:
        raise ValueError(f"--forget {error}") from None


def size(text: str) -> int:
    """Parses a size such as 500MB, 1.5 GiB or 4096."""
    found = SIZE.fullmatch(text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(f"--limit {text!r}, expected a size such as 500MB or 2GiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def listing(folders: Sequence[CacheFolder]) -> str:
    """Returns the folders of the cache as a table, and what is wrong with them."""
    rows: list[dict[str, tables.Value]] = [
        {
            "folder": each.name,
            "files": each.files,
            "size": size_text(each.bytes),
            "rights": each.rights,
            "contents": each.contents,
        }
        for each in folders
    ]
    problems = [f"{each.name} {each.problem}" for each in folders if each.problem]
    title = f"{cache.root()}:{'' if rows else ' nothing'}"
    table = tables.printed(tables.Table(title=title, rows=rows)) or title
    return "\n".join([table, *problems])


def clear(name: str) -> int:
    """Removes one folder of the cache or all, and returns the number of files removed.

    Of a folder that is a link, the link alone is removed.
    """
    folders = {path.name: path for path in _entries() if path.is_dir()}
    if name != ALL and name not in folders:
        known = ", ".join(folders) or "nothing to remove"
        raise ValueError(f"--clear {name!r}, expected a folder of the cache: {known}")
    if not folders:
        return 0
    chosen = [*folders.values()] if name == ALL else [folders[name]]
    with ExitStack() as stack:
        root = stack.enter_context(cache.own(cache.root()))
        for path in chosen:
            if not path.is_symlink():
                stack.enter_context(cache.own(path))
        removed = sum(cache.remove(path.name, root) for path in chosen)
    with suppress(OSError):  # not empty
        cache.root().rmdir()
    return removed


def shrink(limit: int) -> int:
    """Removes the least recently used compiled kernels and returns their number.

    The modification time of a kernel's file is that of its last use.

    `limit`: maximum bytes of the remaining kernels.
    """
    found = []
    with ExitStack() as stack:
        for name, pattern in KERNELS.items():
            if os.path.lexists(folder := cache.folder(name)):
                opened = stack.enter_context(cache.own(folder))
                for file in fnmatch.filter(os.listdir(opened), pattern):
                    with suppress(FileNotFoundError):  # removed by another process
                        found.append((os.lstat(file, dir_fd=opened), file, opened))
        removed = total = 0
        found.sort(key=lambda each: -each[0].st_mtime)
        for status, file, opened in found:
            total += status.st_size
            if total > limit:
                removed += cache.remove(file, opened)
    return removed


def _entries() -> list[Path]:
    root = cache.root()
    return sorted(root.iterdir()) if root.is_dir() else []


def listed() -> list[CacheFolder]:
    """Returns the folders of the cache, sorted by name, and files in their place."""
    return [
        describe(path) for path in _entries() if path.is_dir() or path.name in CONTENTS
    ]


def describe(path: Path) -> CacheFolder:
    """Returns the facts of a folder of the cache, or of its root."""
    sizes = cache.sizes(path)
    contents = CONTENTS.get(path.name, "")
    try:
        rights, problem = stat.filemode(path.stat().st_mode), _unusable(path)
    except FileNotFoundError:
        rights, problem = None, _cannot_be_created(path)
    except OSError as error:
        rights, problem = None, f"cannot be read: {error.strerror}"
    return CacheFolder(
        name=path.name,
        path=str(path),
        contents=f"{contents} (a link)" if path.is_symlink() else contents,
        files=len(sizes),
        bytes=sum(sizes),
        rights=rights,
        problem=problem,
    )


def _unusable(path: Path) -> str | None:
    """Returns why a folder cannot be written to or read safely, or None."""
    if not path.is_dir():
        return "is not a folder"
    # The root's own folders have facts of their own.
    inner = [] if path == cache.root() else filter(Path.is_dir, path.iterdir())
    reasons = filter(None, map(cache.why_untrusted, (path, *inner)))
    if reason := next(reasons, None):
        return f"is not used: {reason}"
    return _refuses_files(path)


def _cannot_be_created(path: Path) -> str | None:
    """Returns why a missing folder cannot be created, or None."""
    parent = next(parent for parent in path.parents if parent.exists())
    reason = _refuses_files(parent)
    return None if reason is None else f"does not exist, and {parent} {reason}"


def _refuses_files(path: Path) -> str | None:
    """Returns why a file cannot be created in a folder, or None.

    Creates a temporary file: access rights do not apply to root, and do not show that a
    file system is read-only.
    """
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        return f"cannot be written to: {error.strerror}"
    return None


def check_writable(folder: Path, prepare: Callable[[Path], Any]) -> None:
    """Checks before measurements, which take minutes, that results can be kept."""
    try:
        with prepare(folder) or nullcontext():
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            f"the results cannot be kept in {folder}: {error.strerror or error}"
        ) from error


def size_text(count: int) -> str:
    """Returns a number of bytes with its unit."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
