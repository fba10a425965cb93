"""Files of measured results: written by several processes, one for each machine."""

import json
import multiprocessing
import os
import platform
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from hypothesis import assume

from mlx_marlin import cache
from mlx_marlin.backends import (
    measured_results,
    planner,
    registry,
    result_files,
    source,
)
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.gather_plan import AnyPlan, GatherProblem
from mlx_marlin.planning.measurement import STOCK, Forwards, Machine, Result, label
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Tile
from mlx_marlin.planning.work.work import Work
from support import strategies
from support.profiles import drawn
from support.results import HERE, PROBLEM, ROWS_EACH, by_problem, measured, write_rows


@drawn(30, plan=strategies.plans())
def test_any_plan_comes_back_as_it_was(tmp_path: Path, plan: Plan) -> None:
    assume(plan.reduction != "atomic" and plan.work.threadgroups <= plan.work.total)
    result = Result(
        plan=plan,
        stock=False,
        medians_us={label(plan): 1.5},
        clock="a clock",
        date="a day",
    )

    result_files.write(tmp_path, HERE, [result])

    found = result_files.read(tmp_path, HERE).results
    assert found[plan.problem] == result
    assert found[plan.problem].plan.work.units == plan.work.units


def result(plan: AnyPlan, **change: Any) -> Result:
    whole: dict[str, Any] = {
        "plan": plan,
        "stock": False,
        "medians_us": {label(plan): 1.5, "another": 10.0},
        "clock": "a clock",
        "date": "a day",
    }
    return Result(**whole | change)


def results_of_all_kinds() -> list[Result]:
    """Returns results in the order of a file: by n, k and rows as numbers."""
    long = replace(PROBLEM, n=128)
    experts = GatherProblem(problem=long, experts=3, pairs_per_row=1)
    gathered, on_cuda = (
        planner.choose_gather(replace(experts, problem=replace(long, m=m)), device)
        for m, device in ((9, DEFAULT), (10, named("H200")))
    )
    first = planner.make(replace(PROBLEM, n=96, k=1024))
    decoded = dequantize_plan(replace(long, m=256, layout="marlin"))
    return [
        result(first, stock=True, medians_us={label(first): 2.0, STOCK: 1.0}),
        result(planner.make(replace(long, m=1), device=named("H200"))),
        result(planner.make(replace(long, m=8)), stock=True, medians_us={}, live=True),
        result(gathered),
        result(on_cuda),
        result(decoded),
        result(planner.make(replace(PROBLEM, n=128, k=512))),
    ]


MODELS = [
    Forwards(
        key=key,
        layout=layout,
        seconds={1: (0.5, 0.25), 2: (0.5, 1.5), 10: (3.0, 2.0)},
        date=f"day {key}",
        invariant=invariant,
        packed_lost=lost,
    )
    for key, layout, invariant, lost in (
        ("a", "mlx", True, False),
        ("b", "marlin", False, True),
    )
]


@pytest.mark.parametrize("order", [1, -1])
def test_every_field_comes_back_and_the_file_is_the_same_in_any_order(
    tmp_path: Path, order: int
) -> None:
    results = results_of_all_kinds()
    whole = result_files.write(tmp_path / "a", HERE, results, MODELS)
    for each in results[::order]:
        result_files.write(tmp_path / "b", HERE, [each])
    for model in MODELS[::order]:
        newer = result_files.write(tmp_path / "b", HERE, forwards=[model])

    found = result_files.read(tmp_path / "b", HERE)

    assert newer.read_bytes() == whole.read_bytes()
    assert [*found.results.items()] == [(each.problem, each) for each in results]
    assert [*found.forwards.items()] == [(each.key, each) for each in MODELS]
    assert not found.unfinished
    newest = replace(MODELS[0], layout="marlin")
    result_files.write(tmp_path / "b", HERE, forwards=[newest])
    found = result_files.read(tmp_path / "b", HERE)
    assert [*found.forwards.values()] == [newest, MODELS[1]]
    assert len(found.results) == len(results)


@pytest.mark.parametrize("newest", [0, 1, 2])
def test_the_chips_newest_file_that_is_valid_says_what_changed(
    tmp_path: Path, newest: int
) -> None:
    assert result_files.changes(tmp_path, HERE) == ""
    earlier = [{"mlx": "0.9.2"}, {"mlx": "0.10.2", "kernels": "x"}, {"system": "D 2"}]
    others = [{"cores": 1}, {"chip": "Apple M9 Max"}, {"chip": "emulator for M9"}]
    for age, change in enumerate([*others, earlier.pop(newest), *earlier]):
        other: Machine = replace(HERE, **change)
        file = result_files.write(tmp_path, other, [measured(PROBLEM)])
        os.utime(file, (12 - age, 12 - age))
    (tmp_path / "apple-m9-10-cores-none.json").write_text("{}")
    (tmp_path / "apple-m9-10-cores-gone.json").symlink_to(tmp_path / "nothing")

    assert (
        result_files.changes(tmp_path, HERE)
        == (
            "measured with mlx 0.9.2, here 0.32.4",
            "measured with mlx 0.10.2, here 0.32.4, "
            "measured with kernels x, here 0123456789abcdef",
            "measured with system D 2, here Darwin 99.1",
        )[newest]
    )
    result_files.write(tmp_path, HERE)
    assert result_files.changes(tmp_path, HERE) == ""


@pytest.mark.parametrize("wrong", [1, 2, 11])
def test_one_warning_tells_the_first_fault_and_counts_the_others(
    tmp_path: Path, wrong: int
) -> None:
    results = [measured(replace(PROBLEM, m=m)) for m in range(1, 12)]
    file = result_files.write(tmp_path, HERE, results, MODELS)
    data = json.loads(file.read_text())
    for row in data["results"][: wrong - 1]:
        row["date"] = 5
    data["forwards"][0]["key"] = 7
    file.write_text(json.dumps(data))

    with pytest.warns(RuntimeWarning) as caught:
        found = result_files.read(tmp_path, HERE)

    more = f" (and {wrong - 1} more)" if wrong > 1 else ""
    assert [str(each.message) for each in caught] == [
        f"mlx_marlin: measured results in {file} are ignored: "
        f"{'result.date is 5' if more else 'forwards.key is 7'}, expected str{more}; "
        f"they are measured again"
    ]
    assert caught[0].filename == __file__
    assert [*found.results.values()] == results[wrong - 1 :]
    assert [*found.forwards.values()] == MODELS[1:]


def test_newer_results_of_the_file_replace_what_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_results, "_of_process", {})
    other, newer = measured(replace(PROBLEM, m=9)), measured(PROBLEM, stock=True)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "write", Mock(side_effect=OSError("full")))
        with pytest.raises(OSError, match="full"):
            measured_results.keep(tmp_path, HERE, [measured(PROBLEM), other], MODELS)
    kept = measured_results.known(tmp_path, HERE)
    assert kept.results == by_problem(measured(PROBLEM), other)
    assert [*kept.forwards.values()] == MODELS

    measured_results.keep(tmp_path, HERE, [newer])

    known = measured_results.known(tmp_path, HERE)
    assert known.results == by_problem(newer, other)
    assert [*known.forwards.values()] == MODELS
    newest, model = measured(PROBLEM, rank=1), replace(MODELS[1], date="newest")
    result_files.write(tmp_path, HERE, [newest], [model])  # by another process
    known = measured_results.known(tmp_path, HERE)
    assert known.results == by_problem(newest, other)
    assert [*known.forwards.values()] == [MODELS[0], model]


@pytest.mark.parametrize("field", [each.name for each in fields(Machine)])
def test_whatever_times_depend_on_has_a_file_of_its_own(
    tmp_path: Path, field: str
) -> None:
    value = getattr(HERE, field)
    other = replace(HERE, **{field: value + 1 if field == "cores" else f"{value}x"})
    result_files.write(tmp_path, HERE, [measured(PROBLEM)])

    assert result_files.read(tmp_path, other).results == {}
    assert len({HERE.file_name, other.file_name}) == 2


def test_the_emulator_is_a_machine_of_its_own() -> None:
    m3 = Device.named("M3 Max", 30)

    real, emulated = (
        measured_results.machine(m3, name) for name in ("metal", "emulator")
    )

    assert (real.chip, real.cores, real.architecture) == (m3.name, 30, m3.arch)
    assert emulated.chip == "emulator for Apple M3 Max"
    assert real.mlx == mx.__version__
    assert real.file_name.startswith("apple-m3-max-30-cores-")


@pytest.mark.parametrize(
    ("version", "system"), [("26.10", "An OS 26.10"), ("", "An OS 6.10.2-generic")]
)
def test_a_machine_has_its_system_and_the_kernels_of_its_back_end(
    version: str, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "An OS")
    monkeypatch.setattr(platform, "mac_ver", lambda: (version, ("", "", ""), "arm64"))
    monkeypatch.setattr(platform, "release", lambda: "6.10.2-generic")
    digests = {}
    for name in ("metal", "cuda", "emulator"):
        measured_results.kernels.cache_clear()
        here = measured_results.machine(DEFAULT, name)
        assert here.system == system
        assert here.kernels == measured_results.kernels(name)
        digests[name] = here.kernels

    assert digests["metal"] == digests["emulator"] != digests["cuda"]


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_a_field_of_a_plan_more_changes_the_machine(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result of before would lack it."""
    shared = {Problem, Epilogue, Tile, Work, Result, Forwards}
    digests = set()
    for changed in (None, *shared, *registry.named(backend).traits.launches):

        def more(type_: Any, changed: Any = changed) -> list[Any]:
            return [*fields(type_), *fields(Machine)[: type_ is changed]]

        monkeypatch.setattr(measured_results, "fields", more)
        measured_results.kernels.cache_clear()
        digests.add(measured_results.kernels(backend))
    measured_results.kernels.cache_clear()

    launches = registry.named(backend).traits.launches
    assert len(digests) == 1 + len({*shared, *launches})


@pytest.mark.parametrize("suffix", ["metal", "cu", "cuh"])
def test_a_shader_that_changes_changes_the_machine(
    suffix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def kernels() -> str:
        source.digest_of_shaders.cache_clear()
        measured_results.kernels.cache_clear()
        return measured_results.machine(DEFAULT, "metal").kernels

    before = kernels()
    monkeypatch.setattr(source, "shader_folder", lambda: tmp_path)
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
    rows = {each.m for each in result_files.read(tmp_path, HERE).results}
    assert rows == {*range(1, 1 + 3 * ROWS_EACH)}


def test_clearing_removes_every_machines_file(tmp_path: Path) -> None:
    assert result_files.clear(tmp_path / "none") == 0
    for cores in (1, 2):
        result_files.write(tmp_path, replace(HERE, cores=cores), [measured(PROBLEM)])

    assert result_files.clear(tmp_path) == 2
    assert result_files.clear(tmp_path) == 0


def test_labels_tell_a_problems_plans_apart() -> None:
    for m in (1, 4, 8, 33, 100):
        for n, k in ((64, 256), (4096, 4096), (11008, 4096)):
            problem = Problem(m=m, n=n, k=k)
            for target in (DEFAULT, Device.named("M3 Max")):
                choice = planner.compare(problem, device=target)
                plans = {each.plan for each in choice.candidates}

                assert len({label(each) for each in plans}) == len(plans)
