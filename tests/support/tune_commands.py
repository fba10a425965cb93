"""What `mlx-marlin tune` measures and keeps, as tests see it."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_marlin.backends import devices, measured_results, result_files, selection
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.planning.measurement import Result
from mlx_marlin.planning.problem import Problem
from support.choose import Choose

PROBLEM = Problem(m=4, n=64, k=256)


def results(kept: Path) -> dict[Problem, Result]:
    return result_files.read(
        kept, measured_results.machine(devices.current(), "emulator")
    ).results


def on_h200(
    backend: Choose, monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90"
) -> None:
    h200 = devices.named("NVIDIA H200")
    assert isinstance(h200, CudaDevice)
    here = replace(h200, arch=arch)
    backend("cuda")
    monkeypatch.setattr(devices, "current", lambda *_: here)
    monkeypatch.setattr(selection, "missing", lambda: None)
