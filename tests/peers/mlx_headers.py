"""The Metal headers of the installed MLX, out of its macOS wheel.

Nothing of them is part of this repository: they are downloaded into the user's cache
directory and handed to the emulator byte for byte.
"""

import fcntl
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

from mlx_marlin import cache

MLX = version("mlx")
FOLDER = "mlx/backend/metal/kernels/"
PRELUDE = ("bf16.h", "bf16_math.h", "complex.h", "defines.h", "logging.h", "utils.h")
"""What MLX puts before every custom kernel: the emulator has its own."""

_PLATFORM = "macosx_14_0_arm64"
_INCLUDE = re.compile(r'^#include "mlx/backend/metal/kernels/([^"]+)".*\n', re.M)


def downloaded() -> Path:
    """The folder of the headers, filled when the cache has none."""
    folder = cache.folder("peers")
    target = folder / f"mlx-{MLX}"
    cache.make(folder)
    with (folder / "lock").open("w") as lock:  # the tests' other processes wait here
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as name:
                _unpack(_wheel(Path(name)), Path(name))
                os.replace(Path(name) / "mlx", target)
    return target


def _wheel(folder: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
    wanted = ("--only-binary=:all:", "--platform", _PLATFORM, f"mlx-metal=={MLX}")
    subprocess.run((*pip, *wanted, "--dest", str(folder)), check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpack(wheel: Path, folder: Path) -> None:
    prefix = f"mlx/include/{FOLDER}"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(prefix) and name.endswith(".h"):
                file = folder / "mlx" / name.removeprefix(prefix)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(archive.read(name))


def flattened(headers: Path, *names: str) -> str:
    """Headers as one text: each once, where it is first included.

    Args:
        headers: The folder of the headers.
        names: Files in it, in order.

    Returns:
        Their text with every `#include` of another MLX header replaced by that header.
    """
    seen = set(PRELUDE)

    def text_of(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (headers / name).read_text()
        # A header may end without a line break.
        return _INCLUDE.sub(lambda found: text_of(found[1]), text) + "\n"

    return "".join(map(text_of, names))


def function(headers: Path, name: str, function: str) -> str:
    """One function template of a header, as it stands there.

    Args:
        headers: The folder of the headers.
        name: A file in it that is left out otherwise: part of the prelude.
        function: Its name.
    """
    text = (headers / name).read_text()
    start = text.rindex("\ntemplate", 0, text.index(f" {function}("))
    return text[start : text.index("\n}\n", start)] + "\n}\n"
