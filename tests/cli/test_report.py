"""`mlx-marlin report`: marks of every time, JSON and arguments."""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

import mlx_marlin
from cli.conftest import Run
from mlx_marlin.backends import devices, measured_results, planner, result_files
from mlx_marlin.cli import models
from mlx_marlin.planning.measurement import STOCK, Result, label
from mlx_marlin.products import this_machine
from support.choose import Choose
from support.decided_calls import with_a_gpu
from support.models import Layers, tiny_llama

TIME = re.compile(r"\d ?(?:us|ms|seconds?|s)\b")
MARKED = re.compile(r"\b(?:predicted|tuned|measured)\b")


@pytest.fixture
def tuned(kept: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps results for a layer of 64→96: our plan for 3 rows, stock for 8."""
    here = devices.named("Apple M3 Max")
    monkeypatch.setattr(devices, "current", lambda *_: here)
    target = this_machine.device()
    results = []
    for m, stock in ((3, False), (8, True)):
        problem = planner.plan(m, 96, 64, group_size=32).plan.problem
        plan = planner.choose(problem, target)
        medians = {label(plan): 12.5, STOCK: 10.5}
        results.append(
            Result(
                plan=plan, stock=stock, medians_us=medians, clock="wall time", date=""
            )
        )
    result_files.write(kept, measured_results.machine(target, "emulator"), results)
    return kept


def test_tuned_times_are_marked(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.QuantizedLinear(64, 96, bias=False, group_size=32)
    layer.set_dtype(mx.float16)
    with_a_gpu(monkeypatch)
    monkeypatch.setenv("COLUMNS", "160")

    report = mlx_marlin.report(Layers(layer), rows=[3, 8, 9])

    few, more, others = report.layers[0].decisions
    assert few.time is not None
    assert (few.served_by, few.time.us) == ("ours", 12.5)
    assert more.time is not None
    assert (more.served_by, more.time.us) == ("stock", 10.5)
    assert (more.reason_origin, more.time.mark) == ("measured", "measured, wall time")
    assert (others.served_by, others.time) == ("stock", None)
    assert "12.5 us measured, wall time" in str(report)
    # The report on a chip, even on this one, uses no times of this machine.
    assert "measured, wall" not in str(
        mlx_marlin.report(Layers(layer), [3, 8], chip="M3 Max")
    )


def times_in(value: Any) -> list[dict[str, Any]]:
    """Returns the objects of a JSON value that have a time."""
    children = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return []
    own = [value] if isinstance(value, dict) and "us" in value else []
    return own + [found for child in children for found in times_in(child)]


@pytest.mark.parametrize("chip", [None, "Apple M3 Max", "NVIDIA H200"])
@pytest.mark.parametrize("layout", [None, "marlin"])
def test_every_time_is_marked(
    tuned: Path, monkeypatch: pytest.MonkeyPatch, chip: str | None, layout: str | None
) -> None:
    with_a_gpu(monkeypatch)
    model = tiny_llama()
    model.extra = nn.QuantizedLinear(64, 96, bias=False, group_size=32)
    model.experts = SwitchGLU(64, 96, 6)
    nn.quantize(model.experts, group_size=32, bits=4)
    model.set_dtype(mx.float16)
    if layout is not None:
        mlx_marlin.optimize(model, layout=layout)

    report = mlx_marlin.report(model, rows=(1, 3, 8, 300), chip=chip)

    assert TIME.search(str(report)) or chip == "NVIDIA H200"
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        cells = re.split(r"  +|\n", str(report))
        assert not [
            cell for cell in cells if TIME.search(cell) and not MARKED.search(cell)
        ]
    document = json.loads(json.dumps(report.document()))
    assert (document["schema"], document["version"]) == ("mlx_marlin.report", 1)
    assert {each["origin"] for each in times_in(document)} <= {"predicted", "measured"}
    assert [each["name"] for each in document["layers"]] == [
        layer.use.name for layer in report.layers
    ]


@pytest.fixture
def loaded(backend: Choose, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Gives commands a small model, and lists what they load."""
    backend("emulator")
    asked: list[tuple[str, bool]] = []

    def load(name: str, *, lazy: bool = False) -> tuple[nn.Module, None]:
        asked.append((name, lazy))
        return tiny_llama(), None

    monkeypatch.setattr(models, "load", load)
    return asked


def test_the_command_prints_the_report_and_writes_json(
    loaded: list[tuple[str, bool]], tmp_path: Path, printed: Run
) -> None:
    file = tmp_path / "report.json"

    said = printed("report a/model --rows 1,8 --chip 'M3 Max' --json", file)

    expected = mlx_marlin.report(tiny_llama(), (1, 8), chip="M3 Max")
    assert said == f"{expected}\n"
    assert json.loads(file.read_text("utf-8")) == json.loads(
        json.dumps(expected.document())
    )
    assert loaded == [("a/model", True)]
    # The default is this process and three rows.
    said = printed("report a/model")
    assert said == f"{mlx_marlin.report(tiny_llama())}\n"
    assert said.startswith("in this process, with the back end emulator (device: ")
