"""Which C++ compiler compiles Metal kernels here, if any."""

from __future__ import annotations

import functools
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

OLDEST_CLANG = 19
NEWEST_CLANG = 23


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


@functools.cache
def find() -> Compiler | None:
    """The compiler to use: a system clang >= 19, else the wheel `ziglang`."""
    return _system_clang() or _wheel_clang()
