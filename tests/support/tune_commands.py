"""What `mlx-marlin tune` measures and keeps, as tests see it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_marlin.backends import devices, planner, result_files, selection, tuned_results
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.measure import tuner
from mlx_marlin.planning.measurement import Result
from mlx_marlin.planning.problem import Problem
from support.choose import Choose

PROBLEM = Problem(m=4, n=64, k=256)


def results(kept: Path) -> dict[Problem, Result]:
    return result_files.read(
        kept, tuned_results.machine(devices.current(), "emulator")
    ).results


def measured_problems(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Stands in for measuring, and lists what would be measured."""
    seen: list[Problem] = []

    def tune(problem: Problem, *_: Any) -> tuner.Outcome:
        seen.append(problem)
        spread = tuner.Spread(median=1e-6)
        plan = planner.choose(problem, devices.current())
        return tuner.Outcome(arms={plan: spread}, wrong=(), result=None)

    monkeypatch.setattr(tuner, "tune", tune)
    return seen


def on_h200(
    backend: Choose, monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90"
) -> None:
    h200 = devices.named("NVIDIA H200")
    assert isinstance(h200, CudaDevice)
    here = replace(h200, arch=arch)
    backend("cuda")
    monkeypatch.setattr(devices, "current", lambda *_: here)
    monkeypatch.setattr(selection, "missing", lambda: None)
