"""A file of results that cannot be trusted is ignored, row by row where possible."""

import json
from collections.abc import Iterator
from dataclasses import make_dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from mlx_marlin import cache, warn_once
from mlx_marlin.backends import planner, result_files
from mlx_marlin.backends.cuda import detection
from mlx_marlin.evidence import codec
from mlx_marlin.guard import verdicts
from mlx_marlin.lm import measured_models
from mlx_marlin.lm.measured_models import MeasuredModel
from mlx_marlin.lm.options import FUSIONS
from mlx_marlin.lm.race.settings import ModelSettings
from mlx_marlin.planning.measurement import Forwards, Measured, Result, label
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.work import MOST_THREADGROUPS
from mlx_marlin.weights.formats import LAYOUTS
from support.guarded_calls import collected
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


def test_of_several_wrong_fields_the_first_is_told() -> None:
    type_ = make_dataclass("Kind", [(f"field{i}", int) for i in range(30)])
    with pytest.raises(ValueError, match=r"^it\.field0 is 'x', expected int$"):
        codec.decoded(type_, {f"field{i}": "x" for i in range(30)})


DECODE_ERRORS: list[tuple[tuple[str, ...], Any]] = [
    (("plan", "work", "threadgroups"), 3),
    (("plan", "work", "strategy"), "magic"),
    (("plan", "kernel"), "gemv2"),
    (("plan", "simdgroups_n"), 0),
    (("plan", "simdgroups_k"), 64),
    (("plan", "unknown"), 1),
    (("type",), "GatherPlan"),
    (("backend",), "rocm"),
    (("backend",), "cuda"),
    (("live",), True),
    (("plan", "problem", "k"), 255),
    (("plan", "problem", "invariant"), True),
    (("plan", "problem", "epilogue", "activation"), "sin"),
    (("medians_us",), {}),
    (("medians_us", "stock MLX"), "fast"),
    (("medians_us", "stock MLX"), -1.0),
    (("medians_us", "stock MLX"), float("nan")),
    (("served_by",), "me"),
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


FORWARDS = Forwards(key="k", layout="mlx", seconds={1: (0.1, 0.2)}, date="2026-11-20")


def results_file(place: Path) -> Path:
    hybrid = planner.make(Problem(m=1, n=512, k=512), strategy="hybrid")
    result = Result(
        plan=hybrid, stock=False, medians_us={label(hybrid): 1}, clock="", date=""
    )
    return result_files.write(place, HERE, [result], [FORWARDS])


def read_results(file: Path) -> int:
    """Reads results and times of models, does with them what `optimize` does."""
    found = result_files.read(file.parent, HERE)
    result_files.changes(file.parent, replace(HERE, mlx="0.0"))
    for forwards in found.forwards.values():
        assert forwards.layout in LAYOUTS
        assert forwards.served.keys() == forwards.seconds.keys()
    for result in found.results.values():
        assert Measured.of(result, result.problem).result == result
    return len(found.forwards) + len(found.results)


def verdict_file(place: Path) -> Path:
    texts = dict.fromkeys(("kernels", "fault", "example", "date", "shaders"), "k")
    verdict = verdicts.Verdict(**texts, state="passed", version=verdicts.version())
    verdicts.write(place / "key.json", verdict)
    return place / "key.json"


def read_verdict(file: Path) -> int:
    warn_once.forget()
    found = verdicts.read(file)
    assert found is None or isinstance(found.failure, str | None)
    return found is not None


def model_file(place: Path) -> Path:
    settings = ModelSettings(trace=True, fuse=(next(iter(FUSIONS)),))
    model = MeasuredModel(
        model="m",
        key="k",
        settings=settings,
        speedups={1: 1.5},
        max_ops_per_buffer=10,
        date="2026-11-20",
    )
    stored = result_files.Stored(settings={"k": codec.encoded(model)})
    return result_files.add(place, HERE, stored)


def read_model(file: Path) -> int:
    warn_once.forget()
    rows = result_files.read(file.parent, HERE).settings
    found = measured_models.decoded(rows.values(), file)
    return sum(bool(each.reason) for each in found)


def figures_file(place: Path) -> Path:
    detection._write("key.json", detection.Figures(7.0, 2.0))
    return cache.folder(detection.FOLDER) / "key.json"


def read_figures(file: Path) -> int:
    warn_once.forget()
    found = detection._read(file.name)
    assert found is None or (0 < found.tflops < inf and 0 < found.bandwidth_gbs < inf)
    return found is not None


STORES = {
    "results": (results_file, read_results, 2),
    "verdicts": (verdict_file, read_verdict, 1),
    "models": (model_file, read_model, 1),
    "figures": (figures_file, read_figures, 1),
}
"""What writes a file of each store, what reads and uses it, and how much it has."""
ODD = (0, -1, 7, 2**70, True, None, "x", [], {}, 1.5, inf, float("nan"), 10**400)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in [*tree] if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


def variants(tree: Any, key: Any) -> Iterator[None]:
    """Changes what is at a place in each way in turn, and puts it back."""
    value = tree[key]
    for odd in (*ODD, [value], {"x": value}):
        tree[key] = odd
        yield
    if isinstance(tree, dict):
        del tree[key]
        yield
        tree["x" * 300] = value
        yield
        del tree["x" * 300]
    tree[key] = value


@pytest.mark.parametrize("store", STORES)
def test_what_is_odd_in_any_store_is_told_and_not_there(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "folder", tmp_path.joinpath)
    make, read, count = STORES[store]
    file = make(tmp_path / "place")
    whole = json.loads(file.read_text())
    assert read(file) == count

    tried = lost = 0
    for tree, key in places(whole):
        for _ in variants(tree, key):
            file.write_text(json.dumps(whole))
            found, messages = collected(lambda: read(file))
            # Files of before have no settings.
            absent = [] if key == "settings" else None
            empty = isinstance(tree, dict) and tree.get(key, absent) == []
            assert found == count or empty or len(messages) == 1, (key, tree)
            assert all(f"{file}" in each for each in messages)
            assert max([0, *map(len, messages)]) < 600 + 2 * len(str(file))
            tried, lost = tried + 1, lost + (found < count)
        file.write_text(json.dumps(whole))
    assert read(file) == count
    assert lost > tried / 2 > 10


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
