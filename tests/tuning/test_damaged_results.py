"""A file of results that cannot be trusted is ignored, row by row where possible."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_marlin.backends import planner, result_files
from mlx_marlin.planning.measurement import Result, label
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.division import MOST_THREADGROUPS
from support.results import HERE, PROBLEM, by_problem, measured, warned


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
    assert "they are measured again" in message
    with pytest.warns(RuntimeWarning, match="are ignored"):
        result_files.write(tmp_path, HERE, [measured(PROBLEM)])
    assert result_files.read(tmp_path, HERE).results == by_problem(measured(PROBLEM))


def test_another_machines_file_under_our_name_is_ignored(tmp_path: Path) -> None:
    other = replace(HERE, cores=11)
    file = result_files.write(tmp_path, other, [measured(PROBLEM)])
    file.rename(tmp_path / HERE.file_name)

    results, message = warned(tmp_path)

    assert results == {}
    assert "belong to another machine" in message


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
    (("plan", "operand"), 1),
    (("plan", "tile"), None),
    (("plan", "unknown"), 1),
    (("plan",), []),
    (("plan", "problem", "m"), 5.5),
    (("type",), "GatherPlan"),
    (("backend",), "rocm"),
    (("backend",), "cuda"),
    (("live",), True),
    (("live",), 1),
    (("plan", "problem", "k"), 255),
    (("plan", "problem", "invariant"), True),
    (("plan", "problem", "epilogue", "activation"), "sin"),
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
    file = result_files.write(tmp_path, HERE, [bad, good])
    data = json.loads(file.read_text())
    at = next(
        row for row in data["results"] if row["plan"]["problem"]["m"] == PROBLEM.m
    )
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
    file = result_files.write(tmp_path, HERE, [result])
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
                result_files.read(tmp_path, HERE)
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


@pytest.mark.parametrize("of", ["file", "folder"])
def test_results_that_others_may_have_written_are_ignored(
    tmp_path: Path, of: str
) -> None:
    place = tmp_path / "tuned"
    file = result_files.write(place, HERE, [measured(PROBLEM)])
    (file if of == "file" else place).chmod(0o777)

    results, message = warned(place)

    assert results == {}
    assert f"{file if of == 'file' else place} can be written by other" in message


def test_results_are_not_written_where_others_may_write(tmp_path: Path) -> None:
    place = tmp_path / "tuned"
    result_files.write(place, HERE, [measured(PROBLEM)])
    place.chmod(0o777)

    with pytest.raises(PermissionError, match="can be written by other users"):
        result_files.write(place, HERE, [measured(PROBLEM, rank=1)])

    place.chmod(0o700)
    assert result_files.read(place, HERE).results == by_problem(measured(PROBLEM))
