"""Compiled kernels in the user's cache, one file for each.

The name of a file is a digest of everything that the machine code depends on. A file
that is not valid is ignored, and replaced when the kernel has been compiled again.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from mlx_marlin import cache, regular_files
from mlx_marlin.backends.cuda.compiling.nvrtc import MachineCode

FOLDER = "kernels"
"""Folder of the cache with compiled CUDA kernels."""
MAGIC = b"mlx_marlin kernel 1\n"
"""First line of a file. The second is JSON, and the rest is the machine code."""
ELF = b"\x7fELF"
MOST_BYTES = 16 * 2**20
"""Most bytes that are read of a file; the kernels have 0.2 MB."""


def file_name(text: str, function: str, identity: str) -> str:
    """Returns the name of a kernel's file."""
    key = json.dumps([text, function, identity])
    return f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"


def read(name: str) -> MachineCode | None:
    """Returns a stored kernel; None if there is none."""
    path = cache.folder(FOLDER) / name
    try:
        if reason := cache.why_untrusted(path):
            raise PermissionError(reason)
        content = regular_files.read(path, MOST_BYTES)
    except FileNotFoundError:
        return None
    _set_time(path)
    return _parsed(path, content)


def write(name: str, compiled: MachineCode) -> None:
    """Stores a kernel."""
    cache.write(cache.folder(FOLDER), name, _content(compiled))


def _content(compiled: MachineCode) -> bytes:
    head = {"symbol": compiled.symbol, "sha256": _digest(compiled.code)}
    return MAGIC + json.dumps(head).encode() + b"\n" + compiled.code


def _parsed(path: Path, content: bytes) -> MachineCode:
    line, _, code = content.removeprefix(MAGIC).partition(b"\n")
    try:
        with regular_files.decoding():
            if not content.startswith(MAGIC):
                raise ValueError("not a file of this version")
            head = json.loads(line)
            symbol, digest = head["symbol"], head["sha256"]
            if not isinstance(symbol, str) or not symbol.isidentifier():
                shown = regular_files.quoted(symbol, 100)
                raise ValueError(f"symbol={shown}, expected a name")
            if digest != _digest(code) or not code.startswith(ELF):
                raise ValueError("the machine code is not complete")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return MachineCode(symbol, code)


def _digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()


def _set_time(path: Path) -> None:
    """Marks a file as used, for `mlx-marlin cache --limit`."""
    with suppress(OSError):
        os.utime(path)
