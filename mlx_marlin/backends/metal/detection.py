"""Which Apple GPU this machine has: what MLX and macOS say about it.

Each question has an answer or None: a missing tool, a slow one, or one that says
something else is not an error, because the chip table stands in.
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

SYSTEM_NAME = ("sysctl", "-n", "machdep.cpu.brand_string")
SYSTEM_BUILD = ("sysctl", "-n", "kern.osversion")
REGISTRY_CORES = ("ioreg", "-rc", "AGXAccelerator", "-d1")
PROFILER_CORES = ("system_profiler", "SPDisplaysDataType", "-json")

QUICK = 2.0
"""Seconds for a tool that answers from the kernel."""
SLOW = 5.0
"""Seconds for the profiler, which asks every display and can take some."""


def here() -> Device:
    """Returns this machine's chip, or what to plan for in its place."""
    name, arch = _metal()
    if key(name) not in chips():  # a virtual machine's GPU is called otherwise
        name = chip_name() or name
    if key(name) in chips():
        device = Device.named(name, gpu_cores())
    else:
        device = _newer(name) if name else DEFAULT
    return replace(device, arch=arch) if ARCHITECTURE.fullmatch(arch) else device


def chip_name() -> str | None:
    """Returns what the system calls its chip, such as "Apple M3 Max"."""
    return (ask(SYSTEM_NAME, QUICK) or "").strip() or None


def os_build() -> str:
    """Returns macOS's build, such as "24F74", or another system's kernel release.

    The compiler of the GPU comes with it.
    """
    if sys.platform != "darwin":
        return platform.release()
    return (ask(SYSTEM_BUILD, QUICK) or "").strip()


def gpu_cores() -> int | None:
    """Returns the GPU cores that the I/O registry states, else the system profiler."""
    in_registry = r'"gpu-core-count"\s*=\s*(\d+)'
    in_profile = r'"sppci_cores"\s*:\s*"?(\d+)'
    return _number(in_registry, ask(REGISTRY_CORES, QUICK)) or _number(
        in_profile, ask(PROFILER_CORES, SLOW)
    )


def _number(pattern: str, answer: str | None) -> int | None:
    """Returns the core count that a pattern finds, if it can be one."""
    found = re.search(pattern, answer or "")
    if found is None or not 0 < int(found[1]) <= MOST_CORES:
        return None
    return int(found[1])


def ask(command: Sequence[str], timeout: float) -> str | None:
    """Returns what a tool prints; None if it is missing, fails or takes too long."""
    import subprocess  # costs more than the rest of this package's planning half

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
    """Returns the default with the name and generation of a chip not in the table."""
    generation = re.match(r"Apple (M\d+)\b", name)
    return replace(
        DEFAULT,
        name=name,
        variant=f"{name}, not in the table, planned as {DEFAULT.cores} cores",
        generation=generation[1] if generation else DEFAULT.generation,
    )


def _metal() -> tuple[str, str]:
    """Returns the Metal device's name and architecture, empty where MLX has none."""
    import mlx.core as mx

    if not mx.metal.is_available():
        return "", ""
    info = mx.device_info(mx.gpu)
    return str(info.get("device_name", "")), str(info.get("architecture", ""))
