"""MLX's folder of compiled kernels.

MLX (0.32.4) looks there for every kernel before it compiles, but keeps only its own. A
kernel is two files: `NAME.ptx` with the machine code and `NAME.txt` with the names of
its functions.
"""

import ctypes
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from mlx_marlin import regular_files
from mlx_marlin.backends.cuda.compiling import kernel_text
from mlx_marlin.backends.cuda.compiling.nvrtc import MachineCode
from mlx_marlin.backends.launch import Launch

ENVIRONMENT = "MLX_PTX_CACHE_DIR"
"""MLX's variable with the path of the folder."""
TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
"""Variables with the folder of temporary files, in the order of C++."""
LONGEST_NAME = 245
"""Longest name of a kernel that MLX does not distribute to several folders."""
SEED = 0xC70F6907
"""Seed of `std::hash` of a string in GNU's library of C++."""


def folder(mlx: str) -> Path:
    """Returns MLX's folder, which may not exist."""
    if named := os.environ.get(ENVIRONMENT):
        return Path(named)
    found = (os.environ.get(name) for name in TEMPORARY)
    temporary = next((path for path in found if path), "/tmp")
    return Path(temporary, "mlx", mlx, "ptx")


def kernel_name(launch: Launch, text: str) -> str:
    """Returns the name by which MLX finds a compiled kernel."""
    content = text.encode()
    name = f"{kernel_text.function(launch)}_{_hash()(content, len(content), SEED):x}"
    if len(name) > LONGEST_NAME:
        raise ValueError(f"the name {name} has more than {LONGEST_NAME} characters")
    return name


def make(target: Path) -> None:
    """Makes MLX's folder if it is missing."""
    target.mkdir(parents=True, exist_ok=True)
    if (owner := target.stat().st_uid) != os.geteuid():
        raise PermissionError(f"{target} belongs to the user {owner}")


def place(target: Path, name: str, launch: Launch, compiled: MachineCode) -> None:
    """Puts a kernel into MLX's folder, unless it is there."""
    make(target)
    names = f"{kernel_text.qualified(launch)}\t{compiled.symbol}\n".encode()
    # MLX looks for the machine code first, so it is written last.
    for suffix, content in ((".txt", names), (".ptx", compiled.code)):
        path = target / f"{name}{suffix}"
        if not _has(path, content):
            _write(path, content)


def _has(path: Path, content: bytes) -> bool:
    try:
        return regular_files.read(path, len(content)) == content
    except (OSError, ValueError):
        return False


def _write(path: Path, content: bytes) -> None:
    """Writes a file atomically, because other processes read it."""
    handle, temporary = tempfile.mkstemp(suffix=".new", dir=path.parent)
    try:
        with regular_files.named(path), os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


@cache
def _hash() -> Any:
    """Returns the function that `std::hash` calls, which MLX's library loads too."""
    library = ctypes.CDLL("libstdc++.so.6")
    function = library._ZSt11_Hash_bytesPKvmm
    function.restype = ctypes.c_size_t
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t)
    return function
