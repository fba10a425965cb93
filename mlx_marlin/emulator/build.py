"""From C++ text to a shared library, and the cache of what was built.

Both the run time and every kernel become shared libraries that need no header and no
library at build time: clang compiles, lld links, nothing else is asked for. So the
first call costs as little as the second, even with the compiler out of the wheel
`ziglang`, whose own driver would first build a C library.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from mlx_marlin import cache
from mlx_marlin.emulator import compiler
from mlx_marlin.emulator.compiler import Compiler

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
SHIM = "shim"
"""Folder of the shim headers, as debug lines have it."""

FLAGS = (
    "-std=c++17",
    "-O2",
    "-gline-tables-only",
    "-fPIC",
    "-ffreestanding",
    "-nostdinc",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-stack-protector",
    "-fno-threadsafe-statics",
    "-fno-strict-aliasing",
    "-fno-omit-frame-pointer",
    "-fno-caret-diagnostics",
    "-fno-color-diagnostics",
    "-fno-crash-diagnostics",
)
"""Flags of every build: no system header, no C++ run time, lines for the reports."""

CHECKS = "alignment,integer-divide-by-zero,shift-exponent"
"""What ends a kernel with a trap instead of undefined behaviour. Without array-bounds:
on unrolled loops over private arrays it doubles the time to compile."""

METAL_FLAGS = (
    # half and bfloat are rounded after every operation, constants have no double.
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    "-Xclang",
    "-cl-single-precision-constant",
    "-ffp-contract=off",
    # The worker flushes float32 denormals; the compiler's own arithmetic must agree.
    "-Xclang",
    "-fdenormal-fp-math-f32=preserve-sign,preserve-sign",
    f"-fsanitize={CHECKS}",
    f"-fsanitize-trap={CHECKS}",
    "-fstack-clash-protection",
    # A loop without an end or an effect is to be found, not to be left out.
    "-fno-finite-loops",
    # A tail call would hide the line that waits, and frames tell who called.
    "-fno-optimize-sibling-calls",
    "-Wno-everything",
)
"""Flags of a Metal kernel."""

TRACE_FLAGS = (
    "-DMSLEMU_TRACE",
    # Calls at every access; the sanitizer's own run time is not there.
    "-Xclang",
    "-fsanitize=thread",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-mllvm",
    "-tsan-instrument-atomics=0",
    "-mllvm",
    "-tsan-instrument-read-before-write=1",
    # Code that serves two lines would name neither.
    "-mllvm",
    "-simplifycfg-sink-common=0",
    "-mllvm",
    "-simplifycfg-hoist-common=0",
    "-mllvm",
    "-enable-tail-merge=0",
    # Accesses of more than 16 bytes would pass without a call.
    "-fno-vectorize",
    "-fno-slp-vectorize",
    # Private arrays, and private variables that are never set: floats are NaN then.
    "-fsanitize=array-bounds",
    "-fsanitize-trap=array-bounds",
    "-ftrivial-auto-var-init=pattern",
    "-Werror=uninitialized",
    "-Wno-sometimes-uninitialized",
)
"""Flags of a Metal kernel that tells of its accesses to memory."""


def machine_flags() -> tuple[str, ...]:
    """The instruction set: AVX2 and half conversions on x86-64, arm64's baseline."""
    return ("-march=x86-64-v3",) if platform.machine() in ("x86_64", "AMD64") else ()


def _lacks_instructions() -> bool:
    """Whether this x86-64 cannot run what `machine_flags` asks for."""
    cpuinfo = Path("/proc/cpuinfo")
    if not machine_flags() or not cpuinfo.exists():
        return False
    found = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return found is not None and not {"avx2", "f16c", "fma"} <= set(found[1].split())


@functools.cache
def unavailable() -> str | None:
    """Why no kernel can be compiled here, or None."""
    for module in ("numpy", "elftools", "platformdirs"):
        if importlib.util.find_spec(module) is None:
            return f"the Python module {module!r} is missing"
    if sys.platform not in ("linux", "darwin"):
        return f"it runs on Linux and macOS, not on {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"):
        return f"it runs on x86-64 and arm64, not on {platform.machine()}"
    if _lacks_instructions():
        return "this processor lacks AVX2, FMA or F16C"
    found = compiler.find()
    if found is None:
        oldest = compiler.OLDEST_CLANG
        return f"there is neither a clang >= {oldest} nor the wheel 'ziglang'"
    try:
        runtime_library(found)
    except (OSError, RefusedError) as error:
        return f"the compiler {found.clang[0]} does not work: {error}"
    return None


@functools.cache
def _cache_folder() -> Path:
    folder = cache.folder("emulator")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _shim_digest() -> bytes:
    digest = hashlib.sha256()
    for folder in ("include", "runtime"):
        for path in sorted((HERE / folder).rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


def _key(parts: tuple[str, ...]) -> str:
    digest = hashlib.sha256(_shim_digest())
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:40]


class RefusedError(Exception):
    """The compiler's complaint, word for word."""


def _run(command: tuple[str, ...], folder: Path) -> None:
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if answer.returncode:
        raise RefusedError(answer.stderr)


def _cached(
    found: Compiler,
    flags: tuple[str, ...],
    target: Path,
    sources: Callable[[Path], list[Path]],
) -> Path:
    """`target`, once built; `sources` may write its files into the folder given."""
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        files = sources(folder)
        _run((*found.clang, *flags, "-c", *map(str, files)), folder)
        objects = tuple(f"{file.stem}.o" for file in files)
        _run((*found.linker, *objects, "-o", "built.so"), folder)
        # Several processes may build the same file: the last rename wins.
        os.replace(folder / "built.so", target)
    return target


def runtime_library(found: Compiler) -> Path:
    """The run time, built when the cache has none."""
    # Calls inside the run time need no detour through its symbol table.
    flags = (*FLAGS, *machine_flags(), "-fvisibility=hidden")
    files = sorted((HERE / "runtime").glob("*.cpp"))
    target = _cache_folder() / f"{_key((found.identity, *flags))}.so"
    return _cached(found, flags, target, lambda _: files)


def kernel_library(
    found: Compiler, text: str, traced: bool = False, folder: Path | None = None
) -> Path:
    """A kernel, built when the cache has none.

    Args:
        found: The compiler.
        text: A whole C++ translation unit.
        traced: Whether it calls the run time at every access to memory.
        folder: The cache, if not the user's.

    Raises:
        RefusedError: With clang's messages, if the text does not compile.
    """
    flags = (*FLAGS, *METAL_FLAGS, *found.separate_traps, *machine_flags())
    if traced:
        flags = (*flags, *TRACE_FLAGS)
    places = (
        *("-I", str(INCLUDE), "-I", str(INCLUDE / "metal")),
        # Installations share the cache: no debug line may name one of them.
        f"-ffile-prefix-map={INCLUDE}={SHIM}",
    )

    def write(folder: Path) -> list[Path]:
        source = folder / "translation.cpp"
        source.write_text(text, encoding="utf-8")
        return [source]

    key = _key((found.identity, *flags, SHIM, text))
    target = (folder or _cache_folder()) / f"{key}.so"
    return _cached(found, (*flags, *places), target, write)
