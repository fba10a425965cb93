"""Tuned results: storage by several processes, validation, and use."""

import json
import multiprocessing
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, assume, given, settings

import mlx_marlin
from mlx_marlin import cache
from mlx_marlin.backends import devices, launch, planner, registry, tuned_results
from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.planning import measurement
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.measurement import STOCK, Machine, Result, label
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work import MOST_THREADGROUPS
from mlx_marlin.products import dispatch
from support import strategies
from support.arguments import activations, weight

Choose = Callable[[str | None], None]

HERE = Machine(
    chip="Apple M9",
    architecture="applegpu_g21g",
    cores=10,
    system="Darwin 99.1",
    mlx="0.32.4",
    kernels="0123456789abcdef",
)
PROBLEM = Problem(m=4, n=64, k=256)


def measured(problem: Problem, *, rank: int = 0, stock: bool = False) -> Result:
    """Returns a result whose plan is one of the cost model's candidates."""
    plan = planner.compare(problem).candidates[rank].plan
    times = {label(plan): 12.5, STOCK: 10.25 if stock else 20.0}
    return Result(
        plan=plan, stock=stock, medians_us=times, clock="wall time", date="2026-11-20"
    )


def by_problem(*results: Result) -> dict[Problem, Result]:
    return {each.plan.problem: each for each in results}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Stores results in a temporary folder, and enables reading them."""
    monkeypatch.setattr(cache, "folder", tmp_path.joinpath)
    monkeypatch.delenv(tuned_results.ENVIRONMENT)
    tuned_results.forget()
    yield tmp_path / "tuned"
    tuned_results.forget()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(strategies.plans())
def test_any_plan_comes_back_as_it_was(tmp_path: Path, plan: Plan) -> None:
    assume(plan.reduction != "atomic" and plan.work.threadgroups <= plan.work.total)
    result = Result(
        plan=plan,
        stock=False,
        medians_us={label(plan): 1.5},
        clock="a clock",
        date="a day",
    )

    tuned_results.write(tmp_path, HERE, [result])

    found = tuned_results.read(tmp_path, HERE)
    assert found[plan.problem] == result
    assert found[plan.problem].plan.work.units == plan.work.units


def test_results_are_added_and_newer_ones_replace_older_ones(tmp_path: Path) -> None:
    other = measured(replace(PROBLEM, m=9))
    newer = measured(PROBLEM, rank=1)

    tuned_results.write(tmp_path, HERE, [measured(PROBLEM)])
    tuned_results.write(tmp_path, HERE, [other])
    file = tuned_results.write(tmp_path, HERE, [newer])

    assert tuned_results.read(tmp_path, HERE) == by_problem(newer, other)
    assert {each.name for each in tmp_path.iterdir()} == {"lock", file.name}


def test_a_file_is_the_same_in_whatever_order_it_was_written(tmp_path: Path) -> None:
    results = [measured(replace(PROBLEM, m=m, n=n)) for m in (1, 9) for n in (64, 96)]

    one = tuned_results.write(tmp_path / "a", HERE, results)
    for each in reversed(results):
        other = tuned_results.write(tmp_path / "b", HERE, [each])

    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("field", [each.name for each in fields(Machine)])
def test_whatever_times_depend_on_has_a_file_of_its_own(
    tmp_path: Path, field: str
) -> None:
    value = getattr(HERE, field)
    other = replace(HERE, **{field: value + 1 if field == "cores" else f"{value}x"})
    tuned_results.write(tmp_path, HERE, [measured(PROBLEM)])

    assert tuned_results.read(tmp_path, other) == {}
    assert len({HERE.file_name, other.file_name}) == 2


def test_the_emulator_is_a_machine_of_its_own() -> None:
    m3 = Device.named("M3 Max", 30)

    real, emulated = (tuned_results.machine(m3, name) for name in ("metal", "emulator"))

    assert (real.chip, real.cores, real.architecture) == (m3.name, 30, m3.arch)
    assert emulated.chip == "emulator for Apple M3 Max"
    assert real.mlx == mx.__version__
    assert real.file_name.startswith("apple-m3-max-30-cores-")


@pytest.mark.parametrize("suffix", ["metal", "cu", "cuh"])
def test_a_shader_that_changes_changes_the_machine(
    suffix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def kernels() -> str:
        tuned_results._kernels.cache_clear()
        return tuned_results.machine(DEFAULT, "metal").kernels

    before = kernels()
    monkeypatch.setattr(tuned_results, "shader_folder", lambda: tmp_path)
    (tmp_path / ".a.swp").write_text("an editor's")
    empty = kernels()
    shader = tmp_path / f"a.{suffix}"
    shader.write_text("x")
    one = kernels()
    shader.write_text("y")
    other = kernels()
    shader.rename(tmp_path / f"b.{suffix}")

    assert len({before, empty, one, other, kernels()}) == 5
    monkeypatch.undo()
    assert kernels() == before


def warned(place: Path) -> tuple[dict[Problem, Result], str]:
    """Reads results some of which are invalid. Returns also the one warning."""
    with pytest.warns(RuntimeWarning, match="are ignored") as caught:
        results = tuned_results.read(place, HERE)
    assert len(caught) == 1
    return results, str(caught[0].message)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"{}",
        b'{"machine": {}, "results": []}',
        b'{"machine": null, "results": 3}',
        b"[" * 100_000,
    ],
)
def test_a_file_that_is_none_is_ignored_and_replaced(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / HERE.file_name).write_bytes(content)

    results, message = warned(tmp_path)

    assert results == {}
    assert "`mlx-marlin tune` measures them anew" in message
    with pytest.warns(RuntimeWarning, match="are ignored"):
        tuned_results.write(tmp_path, HERE, [measured(PROBLEM)])
    assert tuned_results.read(tmp_path, HERE) == by_problem(measured(PROBLEM))


def test_another_machines_file_under_our_name_is_ignored(tmp_path: Path) -> None:
    other = replace(HERE, cores=11)
    file = tuned_results.write(tmp_path, other, [measured(PROBLEM)])
    file.rename(tmp_path / HERE.file_name)

    results, message = warned(tmp_path)

    assert results == {}
    assert "another machine's" in message


def test_a_file_that_cannot_be_read_is_ignored(tmp_path: Path) -> None:
    (tmp_path / HERE.file_name).mkdir()

    assert warned(tmp_path)[0] == {}


DECODE_ERRORS: list[tuple[tuple[str, ...], Any]] = [
    (("plan", "work", "threadgroups"), 3),
    (("plan", "work", "threadgroups"), 2.0),
    (("plan", "work", "strategy"), "magic"),
    (("plan", "kernel"), "gemv2"),
    (("plan", "simdgroups_n"), 0),
    (("plan", "simdgroups_k"), 64),
    (("plan", "subtract"), 1),
    (("plan", "tile"), None),
    (("plan", "unknown"), 1),
    (("plan",), []),
    (("problem", "m"), 5),
    (("problem", "k"), 255),
    (("problem", "invariant"), True),
    (("problem", "epilogue", "activation"), "sin"),
    (("medians_us",), {}),
    (("medians_us",), []),
    (("medians_us", "stock MLX"), "fast"),
    (("medians_us", "stock MLX"), -1.0),
    (("medians_us", "stock MLX"), float("nan")),
    (("served_by",), "me"),
    (("served_by",), []),
    (("date",), 5),
]


@pytest.mark.parametrize(("path", "value"), DECODE_ERRORS)
def test_a_row_of_nonsense_is_ignored_and_the_others_hold(
    tmp_path: Path, path: tuple[str, ...], value: Any
) -> None:
    good, bad = measured(replace(PROBLEM, m=9)), measured(PROBLEM)
    file = tuned_results.write(tmp_path, HERE, [bad, good])
    data = json.loads(file.read_text())
    at = next(row for row in data["results"] if row["problem"]["m"] == PROBLEM.m)
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    file.write_text(json.dumps(data))

    results, _ = warned(tmp_path)

    assert results == by_problem(good)


def test_no_value_anywhere_in_a_file_is_fatal(tmp_path: Path) -> None:
    hybrid = planner.make(Problem(m=1, n=512, k=512), strategy="hybrid")
    result = Result(
        plan=hybrid, stock=False, medians_us={label(hybrid): 1}, clock="", date=""
    )
    file = tuned_results.write(tmp_path, HERE, [result])
    whole = json.loads(file.read_text())

    def places(tree: Any) -> Iterator[tuple[Any, Any]]:
        for key in [*tree] if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            if isinstance(tree[key], dict | list):
                yield from places(tree[key])

    tried = 0
    for tree, key in places(whole):
        value = tree[key]
        for odd in (0, -1, 1, 7, 2**70, True, None, "x", [], {}, 1.5, [value]):
            tree[key] = odd
            file.write_text(json.dumps(whole))
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                tuned_results.read(tmp_path, HERE)
            tried += 1
        tree[key] = value
    assert tried > 300


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"medians_us": {}}, "has no time for"),
        ({"stock": True, "medians_us": {label(measured(PROBLEM).plan): 1}}, "stock"),
        ({"plan": planner.make(PROBLEM, k_parallel=4, reduction="atomic")}, "atomic"),
        ({"plan": planner.make(replace(PROBLEM, invariant=True))}, "invariant=True"),
    ],
)
def test_a_result_checks_itself(change: dict[str, Any], words: str) -> None:
    if "plan" in change:
        change["medians_us"] = {label(change["plan"]): 1.0}

    with pytest.raises(ValueError, match=words):
        replace(measured(PROBLEM), **change)


def test_threadgroups_without_work_are_no_result() -> None:
    plan = planner.make(PROBLEM, strategy="stripe", num_threadgroups=MOST_THREADGROUPS)

    with pytest.raises(ValueError, match="more than 8, the k tiles"):
        Result(plan=plan, stock=False, medians_us={label(plan): 1}, clock="", date="")


ROWS_EACH = 12


def write_rows(place: str, first: int, barrier: Any) -> None:
    """Adds results one by one, in a separate process."""
    barrier.wait()
    for m in range(first, first + ROWS_EACH):
        tuned_results.write(Path(place), HERE, [measured(replace(PROBLEM, m=m))])


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    writers = [
        context.Process(target=write_rows, args=(str(tmp_path), first, barrier))
        for first in (1, 1 + ROWS_EACH, 1 + 2 * ROWS_EACH)
    ]

    for each in writers:
        each.start()
    for each in writers:
        each.join()

    assert [each.exitcode for each in writers] == [0, 0, 0]
    rows = {each.m for each in tuned_results.read(tmp_path, HERE)}
    assert rows == {*range(1, 1 + 3 * ROWS_EACH)}


def test_results_are_read_once_until_they_are_forgotten(kept: Path) -> None:
    here = tuned_results.machine(DEFAULT, "emulator")
    assert tuned_results.find(PROBLEM, DEFAULT, "emulator") is None

    tuned_results.write(kept, here, [measured(PROBLEM)])

    assert tuned_results.find(PROBLEM, DEFAULT, "emulator") is None
    tuned_results.forget()
    assert tuned_results.find(PROBLEM, DEFAULT, "emulator") == measured(PROBLEM)
    assert tuned_results.find(replace(PROBLEM, m=5), DEFAULT, "emulator") is None
    assert tuned_results.find(PROBLEM, DEFAULT, "metal") is None
    tuned_results.clear(kept)
    assert tuned_results.find(PROBLEM, DEFAULT, "emulator") == measured(PROBLEM)


def test_an_epilogue_is_added_to_what_was_measured_without(kept: Path) -> None:
    finished = replace(PROBLEM, epilogue=Epilogue(bias=True, activation="silu"))
    result = measured(PROBLEM, rank=2)
    tuned_results.write(kept, tuned_results.machine(DEFAULT, "emulator"), [result])

    found = tuned_results.find(finished, DEFAULT, "emulator")

    assert found is not None
    assert found.plan == replace(result.plan, problem=finished)
    invariant = replace(PROBLEM, invariant=True)
    assert tuned_results.find(invariant, DEFAULT, "emulator") is None


def test_the_environment_turns_reading_off(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned_results.write(
        kept, tuned_results.machine(DEFAULT, "emulator"), [measured(PROBLEM)]
    )
    monkeypatch.setenv(tuned_results.ENVIRONMENT, "0")

    assert tuned_results.find(PROBLEM, DEFAULT, "emulator") is None
    monkeypatch.setenv(tuned_results.ENVIRONMENT, "1")
    tuned_results.forget()
    assert tuned_results.find(PROBLEM, DEFAULT, "emulator") is not None


def test_times_of_this_chip_are_not_those_of_a_named_one(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m3 = Device.named("M3 Max")
    for backend in ("metal", "emulator"):
        tuned_results.write(
            kept, tuned_results.machine(m3, backend), [measured(PROBLEM)]
        )

    monkeypatch.setenv(devices.ENVIRONMENT, "M3 Max")

    assert tuned_results.find(PROBLEM, m3, "metal") is None
    assert tuned_results.find(PROBLEM, m3, "emulator") is not None


@pytest.mark.parametrize("of", ["file", "folder"])
def test_results_that_others_may_have_written_are_ignored(
    tmp_path: Path, of: str
) -> None:
    place = tmp_path / "tuned"
    file = tuned_results.write(place, HERE, [measured(PROBLEM)])
    (file if of == "file" else place).chmod(0o777)

    results, message = warned(place)

    assert results == {}
    assert f"{file if of == 'file' else place} can be written by other" in message


def test_results_are_not_written_where_others_may_write(tmp_path: Path) -> None:
    place = tmp_path / "tuned"
    tuned_results.write(place, HERE, [measured(PROBLEM)])
    place.chmod(0o777)

    with pytest.raises(PermissionError, match="can be written by other users"):
        tuned_results.write(place, HERE, [measured(PROBLEM, rank=1)])

    place.chmod(0o700)
    assert tuned_results.read(place, HERE) == by_problem(measured(PROBLEM))


def test_clearing_removes_every_machines_file(tmp_path: Path) -> None:
    assert tuned_results.clear(tmp_path / "none") == 0
    for cores in (1, 2):
        tuned_results.write(tmp_path, replace(HERE, cores=cores), [measured(PROBLEM)])

    assert tuned_results.clear(tmp_path) == 2
    assert tuned_results.clear(tmp_path) == 0


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match="file"):
        tuned_results.write(tmp_path / "file" / "tuned", HERE, [measured(PROBLEM)])


HALF = {"dtype": mx.float16}
X, NATIVE = activations(4, 256, **HALF), weight(64, 256, **HALF)


def test_what_was_measured_beats_the_model(kept: Path, ran: list[Plan]) -> None:
    result = measured(PROBLEM, rank=2)
    assert result.plan != planner.choose(PROBLEM, devices.current())
    mlx_marlin.quantized_matmul(X, *NATIVE)
    tuned_results.write(
        kept, tuned_results.machine(devices.current(), "emulator"), [result]
    )
    mlx_marlin.quantized_matmul(X, *NATIVE)

    dispatch.forget()
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
    monkeypatch.setattr(devices, "current", lambda: m3)
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
        here = tuned_results.machine(on_an_m3, "metal")
        tuned_results.write(kept, here, [measured(problem, stock=stock)])
        dispatch.forget()
        said = "measured here: stock MLX took 10.2 us, our best 12.5 us"
        assert mlx_marlin.why_not(x, *native) == (said if stock else None)


def test_what_the_emulator_counted_is_not_asked_on_a_mac(
    kept: Path, on_an_m3: Device
) -> None:
    problem = Problem(m=8, n=4096, k=4096)
    x, native = activations(8, 4096, **HALF), weight(4096, 4096, **HALF)
    emulated = tuned_results.machine(on_an_m3, "emulator")
    tuned_results.write(kept, emulated, [measured(problem, stock=True)])

    assert mlx_marlin.why_not(x, *native) is None


def test_who_forces_a_back_end_gets_our_best_plan(
    kept: Path, on_an_m3: Device, backend: Choose
) -> None:
    result = measured(PROBLEM, rank=2, stock=True)
    tuned_results.write(kept, tuned_results.machine(on_an_m3, "metal"), [result])
    backend("metal")

    assert mlx_marlin.why_not(X, *NATIVE) is None
    assert launch.plans_built() == [result.plan]


def test_importing_the_package_reads_nothing() -> None:
    program = """
import sys
import mlx_marlin
print([name for name in ("backends.tuned_results", "planning", "cache", "tuning")
       if f"mlx_marlin.{name}" in sys.modules])
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )

    assert answer.stdout.strip() == "[]", answer.stderr


def test_labels_tell_a_problems_plans_apart() -> None:
    for m in (1, 4, 8, 33, 100):
        for n, k in ((64, 256), (4096, 4096), (11008, 4096)):
            problem = Problem(m=m, n=n, k=k)
            for target in (DEFAULT, Device.named("M3 Max")):
                choice = planner.compare(problem, device=target)
                plans = {each.plan for each in choice.candidates}

                assert len({label(each) for each in plans}) == len(plans)


def test_the_file_that_the_documentation_shows_is_one() -> None:
    page = Path(__file__).parents[2] / "docs/plans.md"
    text = page.read_text(encoding="utf-8").split("```json\n")[1].split("```")[0]
    data = json.loads(text)

    (row,) = data["results"]

    assert measurement.machine_of(data["machine"]).cores == 8
    assert measurement.row(measurement.result(row, registry.plan_type)) == row
    assert [*measurement.row(measurement.result(row, registry.plan_type))] == [*row]


def test_a_row_names_what_it_holds() -> None:
    row = measurement.row(measured(PROBLEM, stock=True))

    assert [*row] == ["problem", "served_by", "plan", "medians_us", "clock", "date"]
    assert row["served_by"] == "stock"
    assert row["problem"]["m"] == PROBLEM.m
    assert "problem" not in row["plan"]
