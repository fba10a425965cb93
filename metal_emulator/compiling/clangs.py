"""The installed clangs, in the order in which the emulator tries them."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from metal_emulator.compiling import limited

OLDEST_CLANG = 19
NEWEST_CLANG = 23
ENVIRONMENT = "MLX_MARLIN_CLANG"
"""Environment variable with the path or name of the only clang to use."""


@dataclass(frozen=True)
class Compiler:
    """A clang and a linker as command lines."""

    clang: tuple[str, ...]  # Command that compiles to an object file
    linker: tuple[str, ...]  # Command that links object files to a shared library
    identity: str  # A string that changes when the compiler changes
    # Flags that prevent the merging of checks of different lines
    separate_traps: tuple[str, ...] = ("-fno-sanitize-merge",)
    # Whether the number in a trap identifies the failed check
    traps_name_checks: bool = True


@dataclass(frozen=True)
class Candidate:
    """A compiler that may work."""

    name: str  # Name in messages
    # Returns the compiler; raises OSError if it cannot be run, ValueError if it is not
    # clang 19 or later
    make: Callable[[], Compiler]


def candidates() -> Iterator[Candidate]:
    """Yields `MLX_MARLIN_CLANG` if it is set, else the wheel and system clangs."""
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
    """Yields the clangs on the search path without duplicates."""
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
    try:
        output = limited.run((path, "--version"))
    except limited.RefusedError as refused:
        output = str(refused)
    found = re.search(r"clang version (\d+)", output)
    if found is None:
        raise ValueError(
            "`--version` does not name a clang, but prints "
            f"{output.strip()[:200] or 'nothing'}"
        )
    return int(found[1])


def _zig(zig: str) -> Compiler:
    system = "macos" if sys.platform == "darwin" else "linux-gnu"
    machine = "x86_64" if platform.machine() in ("x86_64", "AMD64") else "aarch64"
    clang = (zig, "clang", "-target", f"{machine}-{system}")
    if sys.platform == "darwin":
        # zig's driver finds the system library and signs the result.
        link = (zig, "c++", "-shared", "-Wl,-undefined,dynamic_lookup")
    else:
        link = (zig, "ld.lld", "-shared")
    return Compiler(clang, link, _fingerprint(zig))


def _fingerprint(path: str) -> str:
    status = Path(path).resolve().stat()
    return f"{Path(path).resolve()} {status.st_size} {status.st_mtime_ns}"
