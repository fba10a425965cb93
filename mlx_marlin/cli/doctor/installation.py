"""The installation: versions, environment variables and compilers."""

import os
import platform
import re
import shutil
import sys
from typing import Any

from mlx_marlin.backends.metal import detection
from mlx_marlin.versions import installed

PACKAGES = ("mlx-marlin", "mlx", "mlx-lm")
"""Packages whose versions are reported."""
VARIABLES = ("MLX_", "CUDA_VISIBLE_DEVICES")
"""Prefixes of the environment variables that are reported."""
CLANG = re.compile(r"clang(-\d+)?")
"""Names of compilers that the emulator may use."""


def version_line() -> str:
    """Returns the versions of this package and, if installed, of MLX and mlx-lm."""
    (name, version), *others = ((name, installed(name)) for name in PACKAGES)
    found = [f"{other} {known}" for other, known in others if known]
    text = f"{name} {version or '(not installed)'}"
    return f"{text} ({', '.join(found)})" if found else text


def versions() -> dict[str, Any]:
    """Returns the versions of Python, the packages and the operating system."""
    found: dict[str, Any] = {name: installed(name) for name in PACKAGES}
    return {
        "python": platform.python_version(),
        **found,
        "system": _system(),
        "build": detection.os_build(),
        "machine": platform.machine(),
    }


def environment() -> dict[str, str]:
    """Returns the environment variables that affect MLX or this package."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(VARIABLES)
    }


def compilers() -> dict[str, Any]:
    """Returns the C++ compilers on this machine and the one the emulator uses."""
    from mlx_marlin import emulator
    from mlx_marlin.emulator.compiling import compiler

    used = compiler.find()
    return {
        "found": [*_on_path(), *_wheel()],
        "used": None if used is None else " ".join(used.clang),
        "identity": None if used is None else used.identity,
        "unavailable": emulator.unavailable(),
    }


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _on_path() -> list[str]:
    """Returns the clangs on the search path, in its order."""
    found: dict[str, None] = {}
    for folder in os.get_exec_path():
        names = os.listdir(folder) if os.path.isdir(folder) else []
        for name in sorted(filter(CLANG.fullmatch, names)):
            if (path := shutil.which(name, path=folder)) is not None:
                found[path] = None
    return [*found]


def _wheel() -> list[str]:
    version = installed("ziglang")
    return [] if version is None else [f"the wheel ziglang {version}"]
