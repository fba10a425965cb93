"""The machine that a benchmark ran on, without anything personal."""

import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_marlin import versions
from mlx_marlin.backends import selection, tuned_results
from mlx_marlin.planning.device import PlanningDevice

SECONDS_FOR_GIT = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What times depend on besides the product.

    Attributes:
        chip: Name of the GPU; "emulator for CHIP" if nothing was measured.
        architecture: GPU architecture, such as "applegpu_g15s", or "".
        cores: GPU cores.
        memory_gb: Memory in 2^30 bytes, 0 if MLX has no GPU here.
        system: Operating system and version.
        build: Build of the system, which has the GPU compiler.
        backend: Back end of this package.
        python: Version of Python.
        mlx: Version of MLX.
        mlx_lm: Version of mlx-lm, or "".
        mlx_marlin: Version of this package.
        commit: Commit of this package, or "" outside a repository; "-dirty" follows if
            files were changed.
        kernels: Digest of the kernels' texts.
    """

    chip: str
    architecture: str
    cores: int
    memory_gb: int
    system: str
    build: str
    backend: str
    python: str
    mlx: str
    mlx_lm: str
    mlx_marlin: str
    commit: str
    kernels: str


def facts(device: PlanningDevice) -> MachineFacts:
    """Returns the facts of this machine.

    Args:
        device: The device that plans are made for.
    """
    backend = selection.backend()
    machine = tuned_results.machine(device, backend)
    return MachineFacts(
        chip=machine.chip,
        architecture=machine.architecture,
        cores=machine.cores,
        memory_gb=_memory_gb() if backend in selection.ON_GPU else 0,
        system=machine.system,
        build=selection.active().system_build(),
        backend=backend,
        python=platform.python_version(),
        mlx=machine.mlx,
        mlx_lm=versions.installed("mlx-lm") or "",
        mlx_marlin=versions.installed("mlx-marlin") or "",
        commit=commit(),
        kernels=machine.kernels,
    )


def commit() -> str:
    """Returns the commit of this package, or "" if it is not in its repository."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ("git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*")
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS_FOR_GIT,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _memory_gb() -> int:
    return round(int(mx.device_info().get("memory_size", 0)) / 2**30)
