"""Command lines, and a folder of results for commands in the emulator."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_marlin import cache
from mlx_marlin.backends import devices, graph, measured_results, planner
from mlx_marlin.cli.main import main
from mlx_marlin.measure import tuner
from mlx_marlin.planning.problem import Problem
from support import quantized_folder
from support.choose import Choose

Run = Callable[..., str]
"""Runs a command: the words of a line, and further words such as paths."""


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns what runs a command that ends with `status`, and returns its output."""

    def run(line: str, *words: object, status: int = 0) -> str:
        assert main([*shlex.split(line), *map(str, words)]) == status
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns what runs a command that is refused, and returns the line that says so.

    It prints nothing else, but if it `loads` a model, which one.
    """

    def run(line: str, *words: object, loads: bool = False) -> str:
        capsys.readouterr()
        assert main([*shlex.split(line), *map(str, words)]) == 2
        out, errors = capsys.readouterr()
        *notes, last = errors.splitlines()
        assert out == ""
        assert all(note.startswith("loading ") for note in notes)
        assert loads or not notes
        assert last.startswith("mlx-marlin: error: ")
        return last

    return run


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the demo's model, quantized by MLX in float32."""
    place = tmp_path_factory.mktemp("models") / "quantized"
    return quantized_folder.write(place, mx.float32)


@pytest.fixture
def kept(backend: Choose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Runs kernels in the emulator and keeps results in a folder of the test."""
    monkeypatch.setattr(cache, "folder", tmp_path.joinpath)
    monkeypatch.delenv(measured_results.ENVIRONMENT)
    backend("emulator")
    return tmp_path / "tuned"


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Stands in for the tuner's measuring, and lists what would be measured."""
    seen: list[Problem] = []

    def tune(problem: Problem, *_: Any) -> tuner.Outcome:
        seen.append(problem)
        plan = planner.choose(problem, devices.current())
        arms = {plan: tuner.Spread(median=1e-6)}
        return tuner.Outcome(arms=arms, wrong=(), result=None)

    monkeypatch.setattr(tuner, "tune", tune)
    return seen


@pytest.fixture
def wrong_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every product of our kernels wrong."""
    right = graph.product
    monkeypatch.setattr(
        graph, "product", lambda plan: lambda *given: right(plan)(*given) + 1
    )
