"""Prepares kernels before MLX looks for them: compiled once per machine, then kept.

The user's cache has a file for each kernel, whose name is a digest of everything that
the machine code depends on. A file that is not valid is ignored, and replaced when the
kernel has been compiled again.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlx_marlin import cache, regular_files, state
from mlx_marlin.backends.base import Prepared
from mlx_marlin.backends.cuda.compiling import kernel_text, toolchain
from mlx_marlin.backends.cuda.compiling.nvrtc import CompileError, MachineCode
from mlx_marlin.backends.cuda.compiling.toolchain import Toolchain, UnavailableError
from mlx_marlin.backends.launch import Launch
from mlx_marlin.backends.source import Source
from mlx_marlin.warn_once import warn_once

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


_placed: set[str] = state.register(set())
"""Names of the kernels that are in MLX's folder."""
_OF_THE_TEXT = ": error: "
"""In NVRTC's message if the text is at fault. A header that is missing is a
"catastrophic error"."""


def prepare(launch: Launch) -> Prepared:
    """Puts a kernel into MLX's folder if it is stored, or returns what compiles it."""
    chain = _toolchain()
    if chain is None:
        return Prepared(launch.source)
    named = replace(launch, source=_with_compiler(launch.source, chain))
    try:
        text = kernel_text.text(named)
        name = kernel_text.kernel_name(named, text)
    except (ValueError, OSError, AttributeError) as error:
        _warn_unkept(str(error))
        return Prepared(launch.source)
    if name in _placed:
        return Prepared(named.source)
    qualified = kernel_text.qualified(named)
    file = file_name(text, qualified, chain.identity)
    place = partial(_place, kernel_text.folder(chain.mlx), name, named)
    stored = _stored(file)
    if stored is None:
        compile = partial(_compile, chain, text, named, file, place)
        return Prepared(named.source, name, compile)
    place(stored)
    return Prepared(named.source)


def _stored(file: str) -> MachineCode | None:
    """Returns the stored machine code; None if there is none that is valid."""
    try:
        return read(file)
    except (OSError, ValueError) as error:
        warn_once("ignored CUDA kernels", f"a compiled kernel is ignored: {error}")
        return None


def _compile(
    chain: Toolchain,
    text: str,
    launch: Launch,
    file: str,
    place: Callable[[MachineCode], None],
) -> None:
    """Compiles, stores and places a kernel; warns if that fails.

    It does not warn of an error in the text: MLX compiles the same text next and raises
    the error, which the guard reports.
    """
    try:
        compiled = chain.compile(text, kernel_text.qualified(launch))
    except CompileError as error:
        line = next(iter(str(error).splitlines()), "no message")
        if _OF_THE_TEXT not in line:
            _warn_unkept(f"{kernel_text.function(launch)}: {line}")
        return
    try:
        write(file, compiled)
    except OSError as error:
        _warn_unkept(str(error))
    place(compiled)


def _place(target: Path, name: str, launch: Launch, compiled: MachineCode) -> None:
    """Puts machine code into MLX's folder; warns if that fails."""
    try:
        kernel_text.place(target, name, launch, compiled)
    except OSError as error:
        _warn_unkept(str(error))
    else:
        _placed.add(name)


def _with_compiler(source: Source, chain: Toolchain) -> Source:
    note = f"// NVRTC {chain.compiler.version}, {chain.arch}\n"
    return replace(source, header=source.header + note)


@state.cache(maxsize=1)
def _toolchain() -> Toolchain | None:
    try:
        return toolchain.here()
    except UnavailableError as error:
        _warn_unkept(str(error))
        return None


def _warn_unkept(reason: str) -> None:
    warn_once(
        "unkept CUDA kernels",
        f"compiled CUDA kernels cannot be kept: {reason}. MLX compiles them in each "
        f"process again (docs/troubleshooting.md)",
    )
