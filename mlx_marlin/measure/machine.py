"""The machine that a benchmark ran on, without anything personal."""

import platform
import subprocess
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx

from mlx_marlin import versions
from mlx_marlin.backends import measured_results, selection
from mlx_marlin.measure.rows import MachineFacts
from mlx_marlin.planning.device import PlanningDevice

GIT_SECONDS = 5.0


def facts(device: PlanningDevice) -> MachineFacts:
    """Returns the facts of this machine."""
    backend = selection.backend()
    machine = measured_results.machine(device, backend)
    is_on_gpu = backend in selection.ON_GPU
    memory = int(mx.device_info().get("memory_size", 0)) if is_on_gpu else 0
    return MachineFacts(
        **asdict(machine),
        memory_gb=round(memory / 2**30),
        build=selection.active().system_build(),
        backend=backend,
        python=platform.python_version(),
        mlx_lm=versions.installed("mlx-lm") or "",
        mlx_marlin=versions.installed("mlx-marlin") or "",
        commit=commit(),
    )


def commit() -> str:
    """Returns the commit of this package, or "" if it is not in its repository."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ("git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
