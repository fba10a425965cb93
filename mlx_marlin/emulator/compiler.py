"""The C++ compiler behind the emulator, and the cache of what it has made.

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
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

OLDEST_CLANG = 19
NEWEST_CLANG = 23
HERE = Path(__file__).parent
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

CHECKS = "alignment,array-bounds,integer-divide-by-zero,shift-exponent"
"""What ends a kernel with a trap instead of undefined behaviour."""

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
    # A tail call would hide the line that waits, and frames tell who called.
    "-fno-optimize-sibling-calls",
    "-Wno-everything",
)
"""Flags of a Metal kernel."""


@dataclass(frozen=True)
class Compiler:
    """A clang and a linker as command lines.

    Attributes:
        clang: Compiles to an object file.
        linker: Makes a shared library of object files.
        identity: Changes whenever the compiler does.
        separate_traps: Flags that keep the checks of different lines apart.
    """

    clang: tuple[str, ...]
    linker: tuple[str, ...]
    identity: str
    separate_traps: tuple[str, ...] = ("-fno-sanitize-merge",)


def machine_flags() -> tuple[str, ...]:
    """The instruction set: AVX2 and half conversions on x86-64, arm64's baseline."""
    return ("-march=x86-64-v3",) if platform.machine() in ("x86_64", "AMD64") else ()


def _clang_version(path: str) -> int:
    answer = subprocess.run([path, "--version"], capture_output=True, text=True)
    found = re.search(r"clang version (\d+)", answer.stdout)
    return int(found[1]) if found else 0


def _system_clang() -> Compiler | None:
    names = [f"clang-{n}" for n in range(NEWEST_CLANG, OLDEST_CLANG - 1, -1)]
    for name in ["clang", *names]:
        path = shutil.which(name)
        version = _clang_version(path) if path else 0
        if path and version >= OLDEST_CLANG:
            link = (path, "-nostdlib", "-shared")
            if sys.platform == "darwin":
                link = (path, "-dynamiclib", "-undefined", "dynamic_lookup")
            if version == OLDEST_CLANG:
                separate = ("-mllvm", "-ubsan-unique-traps")
                return Compiler((path,), link, _fingerprint(path), separate)
            return Compiler((path,), link, _fingerprint(path))
    return None


def _wheel_clang() -> Compiler | None:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    zig = str(Path(spec.origin).parent / "zig")
    system = "macos" if sys.platform == "darwin" else "linux-gnu"
    machine = "x86_64" if platform.machine() in ("x86_64", "AMD64") else "aarch64"
    clang = (zig, "clang", "-target", f"{machine}-{system}")
    if sys.platform == "darwin":
        # zig's own driver: it knows where the system library is, and signs the result.
        link = (zig, "c++", "-shared", "-Wl,-undefined,dynamic_lookup")
    else:
        link = (zig, "ld.lld", "-shared")
    return Compiler(clang, link, _fingerprint(zig))


def _fingerprint(path: str) -> str:
    status = Path(path).resolve().stat()
    return f"{Path(path).resolve()} {status.st_size} {status.st_mtime_ns}"


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
    found = find()
    if found is None:
        return f"there is neither a clang >= {OLDEST_CLANG} nor the wheel 'ziglang'"
    try:
        runtime_library(found)
    except (OSError, RefusedError) as error:
        return f"the compiler {found.clang[0]} does not work: {error}"
    return None


@functools.cache
def find() -> Compiler | None:
    """The compiler to use: a system clang >= 19, else the wheel `ziglang`."""
    return _system_clang() or _wheel_clang()


@functools.cache
def _cache_folder() -> Path:
    import platformdirs

    folder = Path(platformdirs.user_cache_dir("mlx_marlin")) / "emulator"
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


def _run(command: tuple[str, ...], folder: str) -> None:
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if answer.returncode:
        raise RefusedError(answer.stderr)


def _build(compiler: Compiler, flags: tuple[str, ...], sources: list[Path]) -> Path:
    key = _key((compiler.identity, *flags, *(p.read_text() for p in sources)))
    return _cached(compiler, flags, sources, key)


def _cached(
    compiler: Compiler, flags: tuple[str, ...], sources: list[Path], key: str
) -> Path:
    target = _cache_folder() / f"{key}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=_cache_folder()) as folder:
        names = tuple(str(path) for path in sources)
        _run((*compiler.clang, *flags, "-c", *names), folder)
        objects = tuple(f"{path.stem}.o" for path in sources)
        _run((*compiler.linker, *objects, "-o", "built.so"), folder)
        # Several processes may build the same file: the last rename wins.
        os.replace(Path(folder) / "built.so", target)
    return target


def runtime_library(compiler: Compiler) -> Path:
    """The run time, built when the cache has none."""
    # Calls inside the run time need no detour through its symbol table.
    flags = (*FLAGS, *machine_flags(), "-fvisibility=hidden")
    return _build(compiler, flags, sorted((HERE / "runtime").glob("*.cpp")))


def kernel_library(compiler: Compiler, text: str) -> Path:
    """A kernel, built when the cache has none.

    Args:
        compiler: From `find`.
        text: A whole C++ translation unit.

    Raises:
        RefusedError: With clang's messages, if the text does not compile.
    """
    include = HERE / "include"
    places = (
        *("-I", str(include), "-I", str(include / "metal")),
        # Installations share the cache: no debug line may name one of them.
        f"-ffile-prefix-map={include}={SHIM}",
    )
    flags = (*FLAGS, *METAL_FLAGS, *compiler.separate_traps, *machine_flags())
    key = _key((compiler.identity, *flags, SHIM, text))
    target = _cache_folder() / f"{key}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=_cache_folder()) as folder:
        source = Path(folder) / "translation.cpp"
        source.write_text(text)
        return _cached(compiler, (*flags, *places), [source], key)
