"""Detection of this machine's Apple GPU from MLX and macOS.

Queries return None instead of raising if a tool is missing, too slow or prints
something unexpected; the chip table then supplies the figures.
"""

import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from mlx_marlin.backends.metal.device import (
    ARCHITECTURE,
    DEFAULT,
    MOST_CORES,
    Device,
    chips,
    key,
)
from mlx_marlin.planning.device import PARAVIRTUAL

SYSTEM_NAME = ("sysctl", "-n", "machdep.cpu.brand_string")
SYSTEM_BUILD = ("sysctl", "-n", "kern.osversion")
SYSTEM_VERSION = ("sysctl", "-n", "kern.osproductversion")
COMPATIBLE_MAJOR = 16
"""macOS calls version 26 so to a program that was built for an older one, such as some
builds of Python: github.com/python/cpython/issues/135675."""
REGISTRY_CORES = ("ioreg", "-rc", "AGXAccelerator", "-d1")
PROFILER_CORES = ("system_profiler", "SPDisplaysDataType", "-json")

TENSOR_SYSTEM = (26, 2)
"""First version of macOS with Metal's tensor operations for all operands."""
QUICK = 2.0
"""Timeout in seconds for tools that query the kernel."""
SLOW = 5.0
"""Timeout in seconds for the system profiler, which queries every display."""


def detect_device() -> Device:
    """Returns this machine's chip, or the default device if it is unknown."""
    name, arch = _metal()
    if name == PARAVIRTUAL:
        device = Device.paravirtual()
    else:
        device = replace(physical(name), has_tensor_system=has_tensor_system())
    return replace(device, arch=arch) if ARCHITECTURE.fullmatch(arch) else device


def physical(name: str) -> Device:
    """Returns the chip with a name in Metal, or what stands in for it, without MLX."""
    if key(name) not in chips():
        name = chip_name() or name
    if key(name) in chips():
        return Device.named(name, gpu_cores())
    return _newer(name) if name else DEFAULT


def has_tensor_system() -> bool:
    """Returns whether this macOS has tensor operations; True if it is not known."""
    found = ask(SYSTEM_VERSION, QUICK) or platform.mac_ver()[0]
    version = [int(part) for part in re.findall(r"\d+", found)]
    if not version:
        return True
    major = 26 if version[0] == COMPATIBLE_MAJOR else version[0]
    return (major, *version[1:], 0)[:2] >= TENSOR_SYSTEM


def chip_name() -> str | None:
    """Returns the chip's name in macOS, such as "Apple M3 Max"."""
    return (ask(SYSTEM_NAME, QUICK) or "").strip() or None


def os_build() -> str:
    """Returns the macOS build, such as "24F74", or another system's kernel release.

    It determines the version of the GPU compiler.
    """
    if sys.platform != "darwin":
        return platform.release()
    return (ask(SYSTEM_BUILD, QUICK) or "").strip()


def gpu_cores() -> int | None:
    """Returns the number of GPU cores from the I/O registry or the system profiler."""
    in_registry = r'"gpu-core-count"\s*=\s*(\d+)'
    in_profile = r'"sppci_cores"\s*:\s*"?(\d+)'
    return _number(in_registry, ask(REGISTRY_CORES, QUICK)) or _number(
        in_profile, ask(PROFILER_CORES, SLOW)
    )


def _number(pattern: str, answer: str | None) -> int | None:
    """Returns the number that a pattern captures if it is a plausible core count."""
    found = re.search(pattern, answer or "")
    if found is None or not 0 < int(found[1]) <= MOST_CORES:
        return None
    return int(found[1])


def ask(command: Sequence[str], timeout: float) -> str | None:
    """Returns a tool's output; None if it is missing, fails or times out."""
    import subprocess  # its import takes longer than the rest of planning

    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.decode("utf-8", "replace")


def _newer(name: str) -> Device:
    """Returns the default device with the name and generation of an unknown chip."""
    generation = re.match(r"Apple (M\d+)\b", name)
    return replace(
        DEFAULT,
        name=name,
        variant=f"{name}, not in the table, planned as {DEFAULT.cores} cores",
        generation=generation[1] if generation else DEFAULT.generation,
    )


def _metal() -> tuple[str, str]:
    """Returns the name and architecture of MLX's Metal device; empty without one."""
    import mlx.core as mx

    if not mx.metal.is_available():
        return "", ""
    info = mx.device_info(mx.gpu)
    return str(info.get("device_name", "")), str(info.get("architecture", ""))
