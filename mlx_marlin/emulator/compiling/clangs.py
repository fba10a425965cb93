"""Which clangs are installed here, in the order in which they are tried."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

OLDEST_CLANG = 19
NEWEST_CLANG = 23
ENVIRONMENT = "MLX_MARLIN_CLANG"
"""Path or name of the only clang to use."""


@dataclass(frozen=True)
class Compiler:
    """A clang and a linker as command lines.

    Attributes:
        clang: Compiles to an object file.
        linker: Makes a shared library of object files.
        identity: Changes whenever the compiler does.
        separate_traps: Flags that keep the checks of different lines apart.
        traps_name_checks: Whether the number in a trap tells which check failed.
    """

    clang: tuple[str, ...]
    linker: tuple[str, ...]
    identity: str
    separate_traps: tuple[str, ...] = ("-fno-sanitize-merge",)
    traps_name_checks: bool = True


@dataclass(frozen=True)
class Candidate:
    """A compiler that may work.

    Attributes:
        name: For messages.
        make: Returns the compiler. Raises OSError if it cannot be run, ValueError if
            it is not a clang of version 19 or later.
    """

    name: str
    make: Callable[[], Compiler]


def candidates() -> Iterator[Candidate]:
    """Yields the compilers to try: `MLX_MARLIN_CLANG` alone, or wheel and system."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen:
        yield Candidate(f"{ENVIRONMENT}={chosen!r}", partial(_named, chosen))
        return
    spec = importlib.util.find_spec("ziglang")
    if spec is not None and spec.origin is not None:
        zig = str(Path(spec.origin).parent / "zig")
        yield Candidate(f"the wheel 'ziglang' ({zig})", partial(_zig, zig))
    for path in _system_clangs():
        yield Candidate(path, partial(_clang, path))


def _named(name: str) -> Compiler:
    path = shutil.which(name)
    if path is None:
        raise ValueError("there is no such program")
    return _clang(path)


def _system_clangs() -> Iterator[str]:
    """Yields the clangs of the search path, each file once."""
    names = [f"clang-{n}" for n in range(NEWEST_CLANG, OLDEST_CLANG - 1, -1)]
    seen = set()
    for name in ["clang", *names]:
        for folder in os.get_exec_path():
            path = shutil.which(name, path=folder)
            if path and (target := os.path.realpath(path)) not in seen:
                seen.add(target)
                yield path


def _clang(path: str) -> Compiler:
    version = _version(path)
    if version < OLDEST_CLANG:
        raise ValueError(f"its version is {version}, expected {OLDEST_CLANG} or later")
    link = (path, "-nostdlib", "-shared")
    if sys.platform == "darwin":
        link = (path, "-dynamiclib", "-undefined", "dynamic_lookup")
    if version == OLDEST_CLANG:
        separate = ("-mllvm", "-ubsan-unique-traps")
        return Compiler((path,), link, _fingerprint(path), separate, False)
    return Compiler((path,), link, _fingerprint(path))


def _version(path: str) -> int:
    answer = subprocess.run([path, "--version"], capture_output=True, text=True)
    found = re.search(r"clang version (\d+)", answer.stdout)
    if found is None:
        said = (answer.stdout + answer.stderr).strip() or "nothing"
        raise ValueError(f"`--version` does not name a clang, but prints {said[:200]}")
    return int(found[1])


def _zig(zig: str) -> Compiler:
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
