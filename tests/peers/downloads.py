"""Other packages, of which some files are kept in the user's cache.

Nothing of them is part of this repository.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from mlx_marlin import cache


def files(package: str, version: str, prefix: str, suffix: str, *platform: str) -> Path:
    """Returns a folder of files of a wheel, downloaded if the cache has none."""
    options = ("--only-binary=:all:", *platform)

    def fill(folder: Path, target: Path) -> None:
        wheel = archive(f"{package}=={version}", options, folder, "*.whl")
        _unpack(wheel, target, prefix, suffix)

    return kept(package, version, fill)


def kept(package: str, version: str, fill: Callable[[Path, Path], None]) -> Path:
    """Returns a folder of the cache, filled if it is missing."""
    folder = cache.folder("peers")
    target = folder / f"{package}-{version}"
    cache.make(folder)
    with (folder / "lock").open("w") as lock:  # the tests' other processes wait here
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                fill(Path(temporary), Path(temporary) / "files")
                os.replace(Path(temporary) / "files", target)
    return target


def archive(wanted: str, options: tuple[str, ...], folder: Path, pattern: str) -> Path:
    """Downloads the archive of a package, such as "a==1.0", and returns its path."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
    subprocess.run((*pip, *options, wanted, "--dest", str(folder)), check=True)
    (found,) = folder.glob(pattern)
    return found


def _unpack(wheel: Path, target: Path, prefix: str, suffix: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.startswith(prefix) and member.filename.endswith(suffix):
                member.filename = member.filename.removeprefix(prefix)
                archive.extract(member, target)
