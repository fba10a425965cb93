"""`mlx-marlin tune` measures, keeps what it finds, and what it keeps is used."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_marlin
from cli.conftest import Run
from mlx_marlin import guard
from mlx_marlin.backends import (
    devices,
    graph,
    measured_results,
    planner,
    result_files,
    selection,
)
from mlx_marlin.cli.main import main
from mlx_marlin.measure import clocks, operands, result_file, timing, tuner
from mlx_marlin.measure.rows import CANDIDATE
from mlx_marlin.planning.problem import problem_of
from support.arguments import activations
from support.choose import Choose
from support.marks import needs_emulator
from support.processes import run_python
from support.results import measured
from support.tune_commands import PROBLEM, results

pytestmark = needs_emulator


@pytest.fixture
def longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the emulator's clock run backwards: another plan than the model's wins."""
    honest = clocks.cost_model

    def backwards(*given: Any, **options: Any) -> dict[Any, timing.Spread]:
        found = honest(*given, **options)
        return {k: replace(v, median=1e-12 / v.median) for k, v in found.items()}

    monkeypatch.setattr(clocks, "cost_model", backwards)


def without_dates(kept: Path) -> Any:
    (file,) = kept.glob("*.json")
    data = json.loads(file.read_text())
    for row in data["results"]:
        assert len(row.pop("date")) == len("2026-11-20")
    return data


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4"])
def test_a_shape_is_tuned_kept_and_used(
    kept: Path, longest_first: None, printed: Run, mode: str
) -> None:
    x = activations(4, 256, dtype=mx.float16)
    plain = mx.random.normal((64, 256)).astype(mx.float16)
    native = mx.quantize(plain, mode=mode)
    before = mlx_marlin.quantized_matmul(x, *native, mode=mode)

    assert "us (cost model)" in printed(f"tune 4x64x256 --mode {mode}")

    (result,) = results(kept).values()
    assert result.plan.problem == problem_of(4, 64, 256, mode=mode)
    assert result.plan != planner.choose(result.plan.problem, devices.current())
    assert result.clock == "cost model"
    # The command has forgotten the plans of this process.
    after = mlx_marlin.quantized_matmul(x, *native, mode=mode)
    assert graph.plans_built() == [result.plan]
    assert mx.allclose(before, after, rtol=1e-2, atol=1e-1).item()


def test_another_process_uses_what_was_kept(kept: Path, longest_first: None) -> None:
    main(["tune", "4x64x256"])
    (result,) = results(kept).values()
    program = f"""
from pathlib import Path
import mlx.core as mx
from mlx_marlin import cache, quantized_matmul
from mlx_marlin.backends import graph
cache.folder = lambda name: {{"tuned": Path({str(kept)!r})}}[name]
zeros = lambda x, *_: mx.zeros((4, 64))
graph.product = lambda plan: print(plan.explain()) or zeros
w = mx.quantize(mx.zeros((64, 256), mx.float16), group_size=64, bits=4)
quantized_matmul(mx.zeros((4, 256), mx.float16), *w)
"""
    answer = run_python(program)

    assert answer.stdout.strip() == result.plan.explain(), answer.stderr


@pytest.mark.slow
def test_the_model_gives_the_same_file_every_time(kept: Path) -> None:
    shapes = ["4x64x256", "8,96,512"]
    main(["tune", *shapes])
    first = without_dates(kept)

    main(["tune", *reversed(shapes)])

    assert without_dates(kept) == first
    assert [row["plan"]["problem"]["m"] for row in first["results"]] == [4, 8]
    assert first["machine"]["chip"].startswith("emulator for")


def test_a_file_has_the_times_of_one_run_each_with_its_plan(
    kept: Path, tmp_path: Path, printed: Run
) -> None:
    machine = measured_results.machine(devices.current(), "emulator")
    today = date.today().isoformat()
    other = replace(measured(replace(PROBLEM, m=8)), date=today)
    result_files.write(kept, machine, [other])
    path = tmp_path / "run.json"

    printed("tune 4x64x256 --json", path)

    written = result_file.read(path)
    arms = tuner.arms(PROBLEM, devices.current(), times_stock=False)
    assert [row.plan for row in written.products] == arms
    assert [row.arm for row in written.products] == [
        f"{CANDIDATE}: {tuner.name(arm)}" for arm in arms
    ]
    assert {row.problem for row in written.products} == {PROBLEM}
    assert not written.is_measured
    assert not written.notes


def test_noise_is_not_called_a_failure(
    kept: Path, monkeypatch: pytest.MonkeyPatch, printed: Run, tmp_path: Path
) -> None:
    steady = clocks.cost_model

    def noisy(*given: Any, **options: Any) -> dict[Any, timing.Spread]:
        found = steady(*given, **options)
        return {
            arm: replace(each, range=each.median * (2 * timing.NOISE))
            for arm, each in found.items()
        }

    monkeypatch.setattr(clocks, "cost_model", noisy)
    path = tmp_path / "run.json"

    said = printed("tune 4x64x256 --json", path)

    assert results(kept) == {}
    assert "1 of 1 problems: too noisy: nothing was kept, measure again" in said
    assert "failed" not in said
    (note,) = result_file.read(path).notes
    assert note.endswith("too noisy: nothing was kept, measure again")


def test_a_wrong_plan_is_told_and_not_kept(
    kept: Path,
    longest_first: None,
    monkeypatch: pytest.MonkeyPatch,
    printed: Run,
    tmp_path: Path,
) -> None:
    right = graph.product

    def product(plan: Any) -> graph.Product:
        run = right(plan)
        return (lambda *given: run(*given) * 2) if plan.is_split else run

    monkeypatch.setattr(graph, "product", product)

    path = tmp_path / "run.json"
    said = printed("tune 4x64x256 --json", path, status=1)

    (result,) = results(kept).values()
    assert not result.plan.is_split
    assert "WRONG product, never used" in said
    written = result_file.read(path)
    assert result.plan in [row.plan for row in written.products]
    assert all(": WRONG product" in note for note in written.notes)
    arms = tuner.arms(PROBLEM, devices.current(), times_stock=False)
    assert len(written.notes) == len(arms) - len(written.products) > 0


def test_without_a_right_plan_nothing_is_kept(
    kept: Path, wrong_products: None, printed: Run
) -> None:
    said = printed("tune 4x64x256", status=1)

    assert results(kept) == {}
    assert "all our plans of 1 of 1 problems failed" in said
    assert "nothing was kept" in said
    assert "kept in" not in said


def test_plans_that_were_wrong_are_not_served_either(
    kept: Path, monkeypatch: pytest.MonkeyPatch, printed: Run
) -> None:
    monkeypatch.setenv(guard.ENVIRONMENT, "1")
    right = graph.product

    def product(plan: Any, *, listed: bool = True) -> graph.Product:
        run = right(plan, listed=listed)
        # The guard's check lists no plan: its answers stay right.
        return (lambda *given: run(*given) + 1) if listed else run

    monkeypatch.setattr(graph, "product", product)

    with pytest.warns(RuntimeWarning, match="wrong in tuning"):
        assert "stock MLX serves them" in printed("tune 4x64x256", status=1)

    x, w = mx.ones((4, 256), mx.float16), mx.quantize(mx.ones((64, 256), mx.float16))
    assert "wrong in tuning" in str(mlx_marlin.why_not(x, *w))

    # All of them are known now, so none is measured again.
    said = printed("tune 4x64x256", status=1)
    assert "a kernel failed its check, never used" in said


def test_clearing_removes_what_was_kept(
    kept: Path, monkeypatch: pytest.MonkeyPatch, printed: Run
) -> None:
    main(["tune", "4x64x256"])
    assert results(kept)

    # Whatever chip is named.
    monkeypatch.setenv(devices.ENVIRONMENT, "H200")
    assert f"files removed from {kept}: 1" in printed("tune --clear")
    monkeypatch.delenv(devices.ENVIRONMENT)

    assert results(kept) == {}


@pytest.mark.parametrize(
    ("on", "chip"), [("metal", "Apple M3 Max"), ("cuda", "NVIDIA H200")]
)
def test_on_a_gpu_the_whole_way_runs_by_the_wall_clock(
    on: str,
    chip: str,
    kept: Path,
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    printed: Run,
) -> None:
    here = devices.named(chip)
    backend(on)
    monkeypatch.setattr(devices, "current", lambda *_: here)
    monkeypatch.setattr(selection, "missing", lambda: None)
    monkeypatch.setattr(operands, "MOST_WEIGHTS", 4)
    # All arms are stock MLX, on the CPU: whoever wins, wins by luck or stays.
    monkeypatch.setattr(
        graph, "product", lambda plan: operands.stock_product(plan.problem)
    )

    monkeypatch.setattr(timing, "NOISE", 1e9)  # this machine is no quiet GPU
    monkeypatch.setenv("COLUMNS", "1000")  # names of plans stay in one line
    said = printed("tune 4x64x256 --seconds 0.1 --layout mlx")

    (result,) = result_files.read(
        kept, measured_results.machine(here, on)
    ).results.values()
    assert result.clock == "wall time"
    arms = tuner.arms(PROBLEM, here, times_stock=True)
    assert {*result.medians_us} == {*map(tuner.name, arms)}
    assert "+- half the interquartile range" in said
    assert all(tuner.name(arm) in said for arm in arms)
    assert str(kept) in said
