"""Wheels of other packages, of which some files are kept in the user's cache.

Nothing of them is part of this repository.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mlx_marlin import cache


def files(package: str, version: str, prefix: str, suffix: str, *platform: str) -> Path:
    """Returns a folder of files of a wheel, downloaded if the cache has none.

    Args:
        package: Its name in the package index.
        version: Its version.
        prefix: What the names of the files begin with; it is removed.
        suffix: What they end with.
        platform: Options of pip that choose the wheel, if there are several.
    """
    folder = cache.folder("peers")
    target = folder / f"{package}-{version}"
    cache.make(folder)
    with (folder / "lock").open("w") as lock:  # the tests' other processes wait here
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                wheel = _wheel(f"{package}=={version}", platform, Path(temporary))
                _unpack(wheel, Path(temporary) / "files", prefix, suffix)
                os.replace(Path(temporary) / "files", target)
    return target


def _wheel(wanted: str, platform: tuple[str, ...], folder: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
    binary = ("--only-binary=:all:", *platform)
    subprocess.run((*pip, *binary, wanted, "--dest", str(folder)), check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpack(wheel: Path, target: Path, prefix: str, suffix: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(prefix) and name.endswith(suffix):
                file = target / name.removeprefix(prefix)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(archive.read(name))
