"""Files of measured results: written by several processes, one for each machine."""

import json
import multiprocessing
from dataclasses import fields, replace
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import assume

from mlx_marlin.backends import planner, result_files, source, tuned_results
from mlx_marlin.backends.metal.device import DEFAULT, Device
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning import measurement_json
from mlx_marlin.planning.measurement import (
    Machine,
    Result,
    label,
)
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
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


def test_results_are_added_and_newer_ones_replace_older_ones(tmp_path: Path) -> None:
    other = measured(replace(PROBLEM, m=9))
    newer = measured(PROBLEM, rank=1)

    result_files.write(tmp_path, HERE, [measured(PROBLEM)])
    result_files.write(tmp_path, HERE, [other])
    file = result_files.write(tmp_path, HERE, [newer])

    assert result_files.read(tmp_path, HERE).results == by_problem(newer, other)
    assert {each.name for each in tmp_path.iterdir()} == {"lock", file.name}


def test_a_file_is_the_same_in_whatever_order_it_was_written(tmp_path: Path) -> None:
    results = [measured(replace(PROBLEM, m=m, n=n)) for m in (1, 9) for n in (64, 96)]

    one = result_files.write(tmp_path / "a", HERE, results)
    for each in reversed(results):
        other = result_files.write(tmp_path / "b", HERE, [each])

    assert one.read_bytes() == other.read_bytes()


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
        source.digest_of_shaders.cache_clear()
        tuned_results.kernels.cache_clear()
        return tuned_results.machine(DEFAULT, "metal").kernels

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


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match="file"):
        result_files.write(tmp_path / "file" / "tuned", HERE, [measured(PROBLEM)])


def test_labels_tell_a_problems_plans_apart() -> None:
    for m in (1, 4, 8, 33, 100):
        for n, k in ((64, 256), (4096, 4096), (11008, 4096)):
            problem = Problem(m=m, n=n, k=k)
            for target in (DEFAULT, Device.named("M3 Max")):
                choice = planner.compare(problem, device=target)
                plans = {each.plan for each in choice.candidates}

                assert len({label(each) for each in plans}) == len(plans)


def test_a_row_of_a_file_comes_back_with_its_fields_in_order() -> None:
    row = json.loads(json.dumps(measurement_json.row(measured(PROBLEM, stock=True))))

    again = measurement_json.row(measurement_json.result(row, lambda *_: MetalPlan))

    assert again == row
    assert [*again] == [*row]
    assert row["served_by"] == "stock"
    assert (row["backend"], row["type"]) == ("metal", "MetalPlan")
    assert row["plan"]["problem"]["m"] == PROBLEM.m
