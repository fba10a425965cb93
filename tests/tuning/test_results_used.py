"""Calls use what was measured on this machine, and nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin import cache, state
from mlx_marlin.backends import devices, graph, measured_results, planner, result_files
from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.planning.dequantize_plan import DequantizePlan, dequantize_plan
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.gather_plan import AnyPlan, AnyProblem, GatherProblem
from mlx_marlin.planning.measurement import STOCK, Measured, Result, label, with_rows
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import serving
from support.arguments import activations, weight
from support.choose import Choose
from support.processes import run_python
from support.results import PROBLEM, measured


def found_of(problem: Problem) -> Measured | None:
    return measured_results.find(problem, DEFAULT, "emulator")


def result_of(problem: Problem) -> Result | None:
    found = found_of(problem)
    return None if found is None else found.result


def keep(
    kept: Path, result: Result, device: Any = DEFAULT, on: str = "emulator"
) -> None:
    """Writes a result as if it had been measured on a device by a back end."""
    result_files.write(kept, measured_results.machine(device, on), [result])


def test_results_are_read_once_until_they_are_forgotten(kept: Path) -> None:
    assert found_of(PROBLEM) is None

    keep(kept, measured(PROBLEM))

    assert found_of(PROBLEM) is None
    state.reset()
    assert result_of(PROBLEM) == measured(PROBLEM)
    assert found_of(replace(PROBLEM, m=5)) is None
    assert measured_results.find(PROBLEM, DEFAULT, "metal") is None
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


EXPERTS = GatherProblem(problem=PROBLEM, experts=3)


def result_at(problem: AnyProblem, m: int, stock: bool, decodes: bool) -> Result:
    """Returns a result of a problem with m rows, or pairs that may be sorted."""
    problem = with_rows(problem, m)
    plan: AnyPlan
    if isinstance(problem, GatherProblem):
        few = replace(problem, pairs_per_row=1)
        problem = replace(problem, is_sorted=True) if m > 9 else few
        plan = planner.choose_gather(problem, DEFAULT)
    else:
        plan = measured(problem).plan
        plan = dequantize_plan(problem) if decodes else plan
    times = {label(plan): 12.5, STOCK: 10.25}
    return Result(plan=plan, stock=stock, medians_us=times, clock="", date="")


def said_by(rows: dict[int, Result], left: bool, m: int) -> Measured | None:
    """What the documents say of m rows, from the strongest rule to the weakest."""
    if m in rows:
        return Measured(reason=rows[m].reason, plan=rows[m].plan, result=rows[m])
    if left and m > 1:
        return Measured(reason="not measured: stock MLX serves it")
    fewer = [each for each in sorted(rows) if each < m][-1:]
    more = [each for each in sorted(rows) if each > m][:1]
    near = [*fewer, *more]
    decodes = {isinstance(rows[each].plan, DequantizePlan) for each in near}
    slower = next((each for each in near if rows[each].stock), None)
    if not fewer or not (more or fewer[0] >= 256):
        return None
    if slower is None:
        return Measured(reason=None, decodes=min(decodes) if len(decodes) < 2 else None)
    if more:
        said = f"at {fewer[0]} and {more[0]} rows: stock MLX serves {slower}"
    else:
        said = f"up to {slower} rows: stock MLX serves {slower} and more"
    return Measured(reason=f"measured here {said}")


@pytest.mark.parametrize("problem", [PROBLEM, EXPERTS], ids=["product", "experts"])
@pytest.mark.parametrize(
    ("stock", "decoded"),
    [({2}, {300}), ({9, 255}, set()), ({10}, {256, 300}), ({300}, {255, 256, 300})],
)
@pytest.mark.parametrize(
    "rows", [[9, 2, 10, 255], [256, 10, 300, 9], [10, 2], [300], []], ids=str
)
def test_the_nearest_measured_rows_decide_about_others(
    kept: Path,
    rows: list[int],
    stock: set[int],
    decoded: set[int],
    problem: AnyProblem,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured_results, "_of_process", {})
    here = measured_results.machine(DEFAULT, "emulator")
    found = {m: result_at(problem, m, m in stock, m in decoded) for m in rows}
    result_files.write(kept, here, [*found.values()][:-1])
    with monkeypatch.context() as patch:
        patch.setattr(cache, "write", Mock(side_effect=OSError("full")))
        with pytest.raises(OSError, match="full"):
            measured_results.keep(kept, here, [*found.values()][-1:])

    other = replace(PROBLEM, n=128)
    measured_results.leave_to_stock(here, other)
    for left in (False, True, False):
        change = (
            measured_results.leave_to_stock if left else measured_results.begin_again
        )
        change(here, with_rows(problem, 77))
        state.reset()
        assert found_of(other) is not None
        for m in (1, 2, 3, 5, 9, 10, 11, 254, 255, 256, 257, 299, 300, 301, 5000):
            asked = found[m].problem if m in found else with_rows(problem, m)
            assert found_of(asked) == said_by(found, left, m), (m, left)
        for field in ({"k": 512}, {"layout": "marlin"}, {"dtype": "bfloat16"}):
            product = replace(PROBLEM, m=11, **field)
            for each in (product, replace(EXPERTS, problem=product)):
                assert found_of(each) is None


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
    monkeypatch.setenv(measured_results.ENVIRONMENT, "0")

    assert found_of(PROBLEM) is None
    monkeypatch.setenv(measured_results.ENVIRONMENT, "1")
    state.reset()
    assert found_of(PROBLEM) is not None


def test_times_of_this_chip_are_not_those_of_a_named_one(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m3 = Device.named("M3 Max")
    for backend in ("metal", "emulator"):
        keep(kept, measured(PROBLEM), m3, backend)

    monkeypatch.setenv(devices.ENVIRONMENT, "M3 Max")

    assert measured_results.find(PROBLEM, m3, "metal") is None
    assert measured_results.find(PROBLEM, m3, "emulator") is not None


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
    monkeypatch.setattr(measured_results, "find", None)

    mlx_marlin.quantized_matmul(X, *NATIVE)

    assert len(ran) == 2


def test_a_bad_file_is_told_once_and_the_model_decides(
    kept: Path, ran: list[Plan]
) -> None:
    kept.mkdir()
    here = measured_results.machine(devices.current(), "emulator")
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
    assert graph.plans_built() == [result.plan]


def test_importing_the_package_reads_nothing() -> None:
    program = """
import sys
import mlx_marlin
print([name for name in ("backends.measured_results", "planning", "cache", "tuning")
       if f"mlx_marlin.{name}" in sys.modules])
"""
    answer = run_python(program)

    assert answer.stdout.strip() == "[]", answer.stderr
