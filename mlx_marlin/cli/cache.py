"""`mlx-marlin cache`: lists, limits and clears the package's cache."""

import argparse
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

from metal_emulator.cache import TEMPORARY_PREFIX
from mlx_marlin import cache, removal
from mlx_marlin.cli import cache_folders, json_output
from mlx_marlin.cli.cache_folders import CacheFolder, size_text

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
LEFTOVER = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}(\d+)-\w+")
"""Name of a temporary folder, with the ID of its process."""
MIN_AGE = 3600
"""Seconds since its last change after which a temporary folder may be removed."""

DESCRIPTION = "List the files in the package's cache."
EPILOG = """
All files of the cache can be recreated, so it is always safe to remove them. The
command also removes temporary folders of killed processes that are older than an hour.

examples:
  mlx-marlin cache --limit 500MB
  mlx-marlin cache --clear emulator
  mlx-marlin cache --forget marlin_gemv
"""


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
    json_output.add_option(parser)


def run(args: argparse.Namespace) -> int:
    """Removes files if requested, and lists the cache."""
    removed = _remove_files(args)
    leftovers = remove_leftovers()
    folders = cache_folders.listed()
    facts = {
        "root": str(cache.root()),
        "folders": [asdict(folder) for folder in folders],
        "removed_files": removed or 0,
        "removed_leftovers": leftovers,
    }
    json_output.write(args, facts)
    if removed is not None:
        print(f"{'files' if args.forget is None else 'verdicts'} removed: {removed}")
    if leftovers:
        print(f"leftover temporary folders removed: {leftovers}")
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
    return None if args.forget is None else forget(args.forget)


def size(text: str) -> int:
    """Parses a size such as 500MB, 1.5 GiB or 4096."""
    found = SIZE.fullmatch(text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(f"--limit {text!r}, expected a size such as 500MB or 2GiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def listing(folders: Iterable[CacheFolder]) -> str:
    """Returns the folders of the cache as text, one per line."""
    lines = [f"{cache.root()}:"]
    for folder in folders:
        lines.append(
            f"  {folder.name:<10} {folder.files:>6} files "
            f"{size_text(folder.bytes):>9}  {folder.contents}".rstrip()
        )
        if folder.problem:
            lines.append(f"    {folder.problem}")
    return "\n".join(lines if lines[1:] else [f"{cache.root()}: nothing"])


def clear(name: str) -> int:
    """Removes one folder of the cache or all, and returns the number of files removed.

    Of a folder that is a link, the link alone is removed.
    """
    folders = {path.name: path for path in _folders()}
    if name != ALL and name not in folders:
        known = ", ".join(folders) or "nothing to remove"
        raise ValueError(f"--clear {name!r}, expected a folder of the cache: {known}")
    if not folders:
        return 0
    chosen = [*folders] if name == ALL else [name]
    with removal.opened(cache.root()) as root:
        for path in (folders[each] for each in chosen):
            _check_owner(path)
        removed = sum(removal.remove(each, root) for each in chosen)
    with suppress(OSError):  # not empty
        cache.root().rmdir()
    return removed


def _check_owner(path: Path) -> None:
    if not path.is_symlink():
        with removal.opened(path):
            pass


def forget(kernel: str) -> int:
    """Removes the verdicts on a kernel, and returns their number."""
    from mlx_marlin.guard import verdicts

    try:
        return verdicts.forget(kernel)
    except ValueError as error:
        raise ValueError(f"--forget {error}") from None


def shrink(limit: int) -> int:
    """Removes the least recently used compiled kernels and returns their number.

    The modification time of a kernel's file is that of its last use.

    `limit`: maximum bytes of the remaining kernels.
    """
    removed = 0
    total = 0
    with ExitStack() as opened:
        files = []
        for name, pattern in KERNELS.items():
            if not os.path.lexists(path := cache.folder(name)):
                continue
            folder = opened.enter_context(removal.opened(path))
            files += [(*each, folder) for each in removal.entries(folder, pattern)]
        for status, name, folder in sorted(files, key=_last_use, reverse=True):
            total += status.st_size
            if total > limit:
                removed += removal.remove(name, folder)
    return removed


def remove_leftovers() -> int:
    """Removes the temporary folders of killed processes, and returns their number."""
    removed = 0
    temporary = Path(tempfile.gettempdir()).resolve()
    with suppress(OSError), removal.opened(temporary, any_owner=True) as folder:
        removed += _remove_old(folder, _is_of_killed_process)
    with suppress(OSError, ValueError), removal.opened(cache.root()) as root:
        for path in _folders():
            with suppress(OSError, ValueError), removal.opened(path.name, root) as each:
                # An unfinished file or a build folder.
                removed += _remove_old(each, lambda name: name.startswith("tmp"))
    return removed


def _remove_old(folder: int, is_temporary: Callable[[str], bool]) -> int:
    """Removes this user's temporary entries that are old, and returns their number."""
    old = [
        name
        for status, name in removal.entries(folder)
        if is_temporary(name)
        and status.st_uid == os.geteuid()
        and time.time() - status.st_mtime >= MIN_AGE
    ]
    for name in old:
        removal.remove(name, folder)
    return len(old)


def _is_of_killed_process(name: str) -> bool:
    found = LEFTOVER.fullmatch(name)
    return found is not None and not _is_running(int(found[1]))


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _folders() -> list[Path]:
    root = cache.root()
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir())


def _last_use(file: tuple[os.stat_result, str, int]) -> float:
    return file[0].st_mtime
