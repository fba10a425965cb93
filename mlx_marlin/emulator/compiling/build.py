"""From C++ text to a shared library, and the cache of what was built.

Both the run time and every kernel become shared libraries that need no header and no
library at build time: clang compiles, a linker links, nothing else is used. So the
first call costs as little as the second, even with the compiler out of the wheel
`ziglang`, whose own driver would first build a C library.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from mlx_marlin import cache
from mlx_marlin.emulator.compiling.clangs import Compiler

HERE = Path(__file__).parents[1]
INCLUDE = HERE / "include"
FOLDER = "emulator"
"""Name of the folder of the cache that keeps what was built."""
LIBRARY = "built.so"
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
    file_name: str,
    sources: Callable[[Path], list[Path]],
    folder: Path | None = None,
) -> Path:
    """A library of the cache, built if it is missing or damaged.

    `sources` may write its files into the folder that it is given.
    """
    path = folder / file_name if folder else cache.find(FOLDER, file_name)
    if path and _is_intact(path):
        _mark_used(path)
        return path
    content = _built(found, flags, sources)
    content += hashlib.sha256(content).digest()
    if folder:
        return cache.write(folder, file_name, content)
    return cache.store(FOLDER, file_name, content)


def _is_intact(path: Path) -> bool:
    """Whether a library ends with the digest of all before.

    Loaders ignore what follows a library's last section.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


@functools.cache
def _mark_used(path: Path) -> None:
    """Sets a library's time, once per process: `mlx-marlin cache --limit` asks it."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _built(
    found: Compiler, flags: tuple[str, ...], sources: Callable[[Path], list[Path]]
) -> bytes:
    """Compiles and links; returns the library."""
    # Not in the cache: a failure here is the compiler's, one of writing is the cache's.
    with tempfile.TemporaryDirectory(prefix=cache.temporary_prefix()) as name:
        folder = Path(name)
        files = sources(folder)
        _run((*found.clang, *flags, "-c", *map(str, files)), folder)
        objects = tuple(f"{file.stem}.o" for file in files)
        _run((*found.linker, *objects, "-o", LIBRARY), folder)
        library = folder / LIBRARY
        if not library.exists() or not library.stat().st_size:
            raise RefusedError(f"{found.linker[0]} has written no library")
        return library.read_bytes()


def runtime_library(found: Compiler) -> Path:
    """The run time, built when the cache has none."""
    # Calls inside the run time need no detour through its symbol table.
    flags = (*FLAGS, *machine_flags(), "-fvisibility=hidden")
    files = sorted((HERE / "runtime").glob("*.cpp"))
    file_name = f"{_key((found.identity, *flags))}.so"
    return _cached(found, flags, file_name, lambda _: files)


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
    return _cached(found, (*flags, *places), f"{key}.so", write, folder)
