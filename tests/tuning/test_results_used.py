"""Calls use what was measured on this machine, and nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin import state
from mlx_marlin.backends import devices, launcher, planner, result_files, tuned_results
from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.measurement import Measured, Result
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import serving
from support.arguments import activations, weight
from support.choose import Choose
from support.processes import run_python
from support.results import PROBLEM, measured


def found_of(problem: Problem) -> Measured | None:
    return tuned_results.find(problem, DEFAULT, "emulator")


def result_of(problem: Problem) -> Result | None:
    found = found_of(problem)
    return None if found is None else found.result


def keep(
    kept: Path, result: Result, device: Any = DEFAULT, on: str = "emulator"
) -> None:
    """Writes a result as if it had been measured on a device by a back end."""
    result_files.write(kept, tuned_results.machine(device, on), [result])


def test_results_are_read_once_until_they_are_forgotten(kept: Path) -> None:
    assert found_of(PROBLEM) is None

    keep(kept, measured(PROBLEM))

    assert found_of(PROBLEM) is None
    state.reset()
    assert result_of(PROBLEM) == measured(PROBLEM)
    assert found_of(replace(PROBLEM, m=5)) is None
    assert tuned_results.find(PROBLEM, DEFAULT, "metal") is None
    result_files.clear(kept)
    assert result_of(PROBLEM) == measured(PROBLEM)


def test_an_epilogue_is_added_to_what_was_measured_without(kept: Path) -> None:
    finished = replace(PROBLEM, epilogue=Epilogue(bias=True, activation="silu"))
    result = measured(PROBLEM, rank=2)
    keep(kept, result)

    found = found_of(finished)

    assert found is not None
    assert found.plan == replace(result.plan, problem=finished)
    invariant = replace(PROBLEM, invariant=True)
    assert found_of(invariant) is None


@pytest.mark.parametrize("order", [[4, 8, 24], [24, 8, 4], [8, 24, 4]])
def test_between_measured_rows_ours_serve_if_they_do_at_both(
    kept: Path, order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned_results, "_of_process", {})
    *written, last = [measured(replace(PROBLEM, m=m), stock=m == 24) for m in order]
    for result in written:
        keep(kept, result)
    here = tuned_results.machine(DEFAULT, "emulator")
    tuned_results.remember(here, [last], [])  # this process could not write it

    def said(m: int, **change: Any) -> Measured | None:
        return found_of(replace(PROBLEM, m=m, **change))

    slower = "measured here at 8 and 24 rows: stock MLX serves 24"
    assert [said(m) for m in (1, 3, 25, 100)] == [None] * 4  # outside of them
    assert [said(m) for m in (5, 7)] == [Measured(reason=None, decodes=False)] * 2
    assert [said(m) for m in (9, 23)] == [Measured(reason=slower)] * 2
    for change in ({"n": 128}, {"k": 512}, {"layout": "marlin"}, {"dtype": "bfloat16"}):
        assert said(5, **change) is None


@pytest.mark.parametrize("stock", [False, True])
def test_times_of_a_transposed_weight_say_nothing_of_the_other_product(
    kept: Path, on_an_m3: Device, stock: bool
) -> None:
    problem = replace(PROBLEM, layout="marlin")
    here = serving.here(lambda _: None)
    before = serving.serve_problem(problem, here, transpose=False)

    keep(kept, measured(problem, stock=stock), on_an_m3, "metal")
    state.reset()

    found = serving.serve_problem(problem, here)
    assert (found == measured(problem).plan) is not stock
    assert serving.serve_problem(problem, here, transpose=False) == before


@pytest.mark.parametrize(
    "change", [{"epilogue": Epilogue(activation="silu", gated=True)}, {"norm": 1e-5}]
)
def test_plans_of_gated_and_normalized_products_are_not_those_of_plain_ones(
    kept: Path, change: dict[str, Any]
) -> None:
    keep(kept, measured(PROBLEM, stock=True))

    found = found_of(replace(PROBLEM, **change))

    assert found is not None
    assert found.plan is None
    assert "measured here" in str(found.reason)


def test_the_environment_turns_reading_off(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(kept, measured(PROBLEM))
    monkeypatch.setenv(tuned_results.ENVIRONMENT, "0")

    assert found_of(PROBLEM) is None
    monkeypatch.setenv(tuned_results.ENVIRONMENT, "1")
    state.reset()
    assert found_of(PROBLEM) is not None


def test_times_of_this_chip_are_not_those_of_a_named_one(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m3 = Device.named("M3 Max")
    for backend in ("metal", "emulator"):
        keep(kept, measured(PROBLEM), m3, backend)

    monkeypatch.setenv(devices.ENVIRONMENT, "M3 Max")

    assert tuned_results.find(PROBLEM, m3, "metal") is None
    assert tuned_results.find(PROBLEM, m3, "emulator") is not None


HALF = {"dtype": mx.float16}

X, NATIVE = activations(4, 256, **HALF), weight(64, 256, **HALF)


def test_what_was_measured_beats_the_model(kept: Path, ran: list[Plan]) -> None:
    result = measured(PROBLEM, rank=2)
    assert result.plan != planner.choose(PROBLEM, devices.current())
    mlx_marlin.quantized_matmul(X, *NATIVE)
    keep(kept, result, devices.current())
    mlx_marlin.quantized_matmul(X, *NATIVE)

    state.reset()
    mlx_marlin.quantized_matmul(X, *NATIVE)

    model = planner.choose(PROBLEM, devices.current())
    assert ran == [model, model, result.plan]


def test_a_cached_call_asks_for_nothing(
    kept: Path, ran: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    mlx_marlin.quantized_matmul(X, *NATIVE)
    monkeypatch.setattr(tuned_results, "find", None)

    mlx_marlin.quantized_matmul(X, *NATIVE)

    assert len(ran) == 2


def test_a_bad_file_is_told_once_and_the_model_decides(
    kept: Path, ran: list[Plan]
) -> None:
    kept.mkdir()
    here = tuned_results.machine(devices.current(), "emulator")
    (kept / here.file_name).write_text("nonsense")

    with pytest.warns(RuntimeWarning, match="are ignored"):
        mlx_marlin.quantized_matmul(X, *NATIVE)
    mlx_marlin.quantized_matmul(X[:2], *NATIVE)  # another warning would be an error

    assert ran[0] == planner.choose(PROBLEM, devices.current())


@pytest.fixture
def on_an_m3(backend: Choose, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Makes Metal seem available, on an M3 Max."""
    m3 = Device.named("M3 Max")
    backend(None)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(devices, "current", lambda *_: m3)
    return m3


@pytest.mark.parametrize("m", [1, 8])  # the model: stock, ours
def test_stock_serves_what_it_was_measured_to_serve_faster(
    kept: Path, on_an_m3: Device, m: int
) -> None:
    problem = Problem(m=m, n=4096, k=4096)
    x, native = activations(m, 4096, **HALF), weight(4096, 4096, **HALF)
    model = mlx_marlin.why_not(x, *native)
    assert (model is None) == (m == 8)

    for stock in (True, False):
        keep(kept, measured(problem, stock=stock), on_an_m3, "metal")
        state.reset()
        said = "measured here: stock MLX took 10.2 us, our best 12.5 us"
        assert mlx_marlin.why_not(x, *native) == (said if stock else None)


def test_what_the_emulator_counted_is_not_asked_on_a_mac(
    kept: Path, on_an_m3: Device
) -> None:
    problem = Problem(m=8, n=4096, k=4096)
    x, native = activations(8, 4096, **HALF), weight(4096, 4096, **HALF)
    keep(kept, measured(problem, stock=True), on_an_m3)

    assert mlx_marlin.why_not(x, *native) is None


def test_who_forces_a_back_end_gets_our_best_plan(
    kept: Path, on_an_m3: Device, backend: Choose
) -> None:
    result = measured(PROBLEM, rank=2, stock=True)
    keep(kept, result, on_an_m3, "metal")
    backend("metal")

    assert mlx_marlin.why_not(X, *NATIVE) is None
    assert launcher.plans_built() == [result.plan]


def test_importing_the_package_reads_nothing() -> None:
    program = """
import sys
import mlx_marlin
print([name for name in ("backends.tuned_results", "planning", "cache", "tuning")
       if f"mlx_marlin.{name}" in sys.modules])
"""
    answer = run_python(program)

    assert answer.stdout.strip() == "[]", answer.stderr
