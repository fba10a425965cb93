"""Prepares kernels before MLX looks for them: compiled once per machine, then kept."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlx_marlin import state
from mlx_marlin.backends.base import Prepared
from mlx_marlin.backends.cuda.compiling import (
    kernel_files,
    kernel_text,
    mlx_folder,
    toolchain,
)
from mlx_marlin.backends.cuda.compiling.nvrtc import CompileError, MachineCode
from mlx_marlin.backends.cuda.compiling.toolchain import Toolchain, UnavailableError
from mlx_marlin.backends.launch import Launch
from mlx_marlin.backends.source import Source
from mlx_marlin.warn_once import warn_once

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
        name = mlx_folder.kernel_name(named, text)
    except (ValueError, OSError, AttributeError) as error:
        _warn_unkept(str(error))
        return Prepared(launch.source)
    if name in _placed:
        return Prepared(named.source)
    qualified = kernel_text.qualified(named)
    file = kernel_files.file_name(text, qualified, chain.identity)
    place = partial(_place, mlx_folder.folder(chain.mlx), name, named)
    stored = _stored(file)
    if stored is None:
        compile = partial(_compile, chain, text, named, file, place)
        return Prepared(named.source, name, compile)
    place(stored)
    return Prepared(named.source)


def _stored(file: str) -> MachineCode | None:
    """Returns the stored machine code; None if there is none that is valid."""
    try:
        return kernel_files.read(file)
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
        kernel_files.write(file, compiled)
    except OSError as error:
        _warn_unkept(str(error))
    place(compiled)


def _place(target: Path, name: str, launch: Launch, compiled: MachineCode) -> None:
    """Puts machine code into MLX's folder; warns if that fails."""
    try:
        mlx_folder.place(target, name, launch, compiled)
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
