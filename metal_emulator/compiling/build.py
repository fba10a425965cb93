"""Compiles C++ to shared libraries and caches them.

The runtime and the kernels use no system header and no library: clang compiles and a
linker links. With the wheel `ziglang` this avoids zig's driver, which would first build
a C library.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from metal_emulator import cache, regular_files
from metal_emulator.compiling.clangs import Compiler
from metal_emulator.compiling.flags import (
    FLAGS,
    METAL_FLAGS,
    TENSOR_FLAGS,
    TRACE_FLAGS,
    machine_flags,
    uses_tensors,
)
from metal_emulator.compiling.limited import ExceededError, RefusedError, run

HERE = Path(__file__).parents[1]
INCLUDE = HERE / "include"
TENSOR = "tensor"
"""Folders of the headers of tensor operations, which few kernels include."""
LIBRARY = "built.so"
MOST_BYTES = 2**28
"""Largest library that is read; those of kernels have a few megabytes."""
HEADER = "kernel.h"
"""The header that every kernel includes. It is compiled once for all kernels that have
the same flags, which saves a fifth of a kernel's compile time."""
SHIM = "shim"
"""Folder of the shim headers in debug information."""


@functools.cache
def _shim_digest(with_tensors: bool) -> bytes:
    digest = hashlib.sha256()
    for folder in ("include", "runtime"):
        for path in sorted((HERE / folder).rglob("*")):
            for_tensors = TENSOR in path.relative_to(HERE).parts
            if path.is_file() and (with_tensors or not for_tensors):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


def _key(parts: tuple[str, ...], with_tensors: bool = False) -> str:
    digest = hashlib.sha256(_shim_digest(with_tensors))
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:40]


def _cached(
    file_name: str, make: Callable[[], bytes], folder: Path | None = None
) -> Path:
    """Returns a file of the cache, after making it if missing or damaged."""
    path = folder / file_name if folder else cache.find(file_name)
    if path and _is_intact(path):
        _mark_used(path)
        return path
    content = make()
    content += hashlib.sha256(content).digest()
    if folder:
        return cache.write(folder, file_name, content)
    return cache.store(file_name, content)


def _is_intact(path: Path) -> bool:
    """Returns whether a file ends with the digest of its other bytes.

    Loaders ignore bytes after the last section, and clang those after the last block of
    a precompiled header. One that is damaged can keep clang busy for ever.
    """
    try:
        content = regular_files.read(path, MOST_BYTES)
    except (OSError, ValueError):
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


@functools.cache
def _mark_used(path: Path) -> None:
    """Updates a file's time once per process, for `mlx-marlin cache --limit`."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _compile(
    found: Compiler,
    flags: tuple[str, ...],
    files: list[str],
    folder: Path,
    with_header: bool,
) -> None:
    """Compiles source files to object files in a folder."""
    header = _precompiled(found, flags) if with_header else None
    if header:
        # Its name contains a digest of what it was made of.
        options = ("-Xclang", "-fno-validate-pch", "-include-pch", str(header))
        # If this clang refuses it or it is gone, the header is read.
        try:
            run((*found.clang, *flags, *options, "-c", *files), folder)
            return
        except ExceededError:
            raise
        except RefusedError:
            pass
    run((*found.clang, *flags, "-c", *files), folder)


def _precompiled(found: Compiler, flags: tuple[str, ...]) -> Path | None:
    """Returns the precompiled `HEADER` for kernels with these flags, or None."""

    def make() -> bytes:
        with tempfile.TemporaryDirectory() as name:
            result = Path(name) / HEADER
            options = ("-x", "c++-header", str(INCLUDE / HEADER), "-o", str(result))
            run((*found.clang, *flags, *options), Path(name))
            return result.read_bytes()

    key = _key((found.identity, *flags), with_tensors=True)
    try:
        return _cached(f"{key}.pch", make)
    except (RefusedError, OSError):
        return None


def _built(
    found: Compiler,
    flags: tuple[str, ...],
    sources: Callable[[Path], list[Path]],
    with_header: bool,
) -> bytes:
    """Compiles and links, and returns the content of the library."""
    # Built outside of the cache, which may be full: a folder replaces it then.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = sources(folder)
        _compile(found, flags, [*map(str, files)], folder, with_header)
        objects = tuple(f"{file.stem}.o" for file in files)
        run((*found.linker, *objects, "-o", LIBRARY), folder)
        library = folder / LIBRARY
        if not library.exists() or not library.stat().st_size:
            raise RefusedError(f"{found.linker[0]} has written no library")
        return library.read_bytes()


def runtime_library(found: Compiler) -> Path:
    """Returns the runtime library, after building it if the cache has none."""
    # Hidden symbols make calls inside the runtime direct.
    flags = (*FLAGS, *machine_flags(), "-fvisibility=hidden")
    files = sorted((HERE / "runtime").glob("*.cpp"))
    file_name = f"{_key((found.identity, *flags))}.so"
    return _cached(file_name, lambda: _built(found, flags, lambda _: files, False))


def _include_flags() -> tuple[str, ...]:
    return (
        *("-I", str(INCLUDE), "-I", str(INCLUDE / "metal")),
        *("-I", str(INCLUDE / TENSOR)),
        # Installations share the cache, so debug lines must not contain their paths.
        f"-ffile-prefix-map={INCLUDE}={SHIM}",
    )


def _kernel_flags(found: Compiler, text: str) -> tuple[str, ...]:
    flags = (*FLAGS, *METAL_FLAGS, *found.separate_traps, *machine_flags())
    return (*flags, *TENSOR_FLAGS) if uses_tensors(text) else flags


def preprocessed(found: Compiler, probe: str, text: str) -> str:
    """Returns what the preprocessor makes of a probe in a kernel's place."""
    flags = (*_kernel_flags(found, text), *_include_flags(), "-include", HEADER)
    return run((*found.clang, *flags, "-E", "-P", "-x", "c++", "-"), text=probe)


def kernel_library(
    found: Compiler,
    text: str,
    traced: bool = False,
    folder: Path | None = None,
    tensor_layout: str = "m5",
) -> Path:
    """Returns the library of a kernel, after building it if the cache has none."""
    flags = _kernel_flags(found, text)
    if traced:
        flags = (*flags, *TRACE_FLAGS)
    with_tensors = uses_tensors(text)
    if with_tensors:
        flags = (*flags, f"-DMSLEMU_TENSOR_LAYOUT={tensor_layout}")

    def write(folder: Path) -> list[Path]:
        source = folder / "translation.cpp"
        source.write_text(text, encoding="utf-8")
        return [source]

    key = _key((found.identity, *flags, SHIM, text), with_tensors)
    flags = (*flags, *_include_flags())
    return _cached(f"{key}.so", lambda: _built(found, flags, write, True), folder)
