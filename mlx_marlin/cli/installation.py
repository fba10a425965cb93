"""The installation: versions, extras, environment variables and compilers."""

import os
import platform
import sys
from typing import Any

from mlx_marlin.backends.metal import detection
from mlx_marlin.versions import installed

PACKAGES = ("mlx-marlin", "mlx", "mlx-lm")
"""Packages whose versions are reported."""
EXTRAS = {
    **dict.fromkeys(("mlx_lm", "numpy", "tqdm"), "lm"),
    **dict.fromkeys(("elftools", "ziglang"), "emulator"),
    "gguf": "gguf",
    "matplotlib": "plot",
}
"""Module that may be missing -> the extra of this package that has it."""
VARIABLES = ("MLX_", "CUDA_VISIBLE_DEVICES")
"""Prefixes of the environment variables that are reported."""


def version_line() -> str:
    """Returns the versions of this package and, if installed, of MLX and mlx-lm."""
    (name, version), *others = ((name, installed(name)) for name in PACKAGES)
    found = [f"{other} {known}" for other, known in others if known]
    text = f"{name} {version or '(not installed)'}"
    return f"{text} ({', '.join(found)})" if found else text


def why_missing(error: ImportError, extra: str | None = None) -> str:
    """Returns an error's text, and how to install the extra that has the module.

    Nothing is published: somebody else could take the name.
    """
    extra = extra or EXTRAS.get((error.name or "").partition(".")[0])
    hint = f'; pip install ".[{extra}]" in a checkout of mlx_marlin' if extra else ""
    return f"{error}{hint}"


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
    """Returns the C++ compiler that the emulator uses, and why it cannot run."""
    import metal_emulator
    from metal_emulator.compiling import compiler

    used = compiler.find()
    return {
        "used": None if used is None else " ".join(used.clang),
        "identity": None if used is None else used.identity,
        "unavailable": metal_emulator.unavailable(),
    }


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()
