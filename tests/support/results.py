"""Measured results, made up."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_marlin.backends import planner, result_files
from mlx_marlin.planning.measurement import STOCK, Machine, Result, label
from mlx_marlin.planning.problem import Problem

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
    """Returns a result that keeps one of the model's candidates."""
    plan = planner.compare(problem).candidates[rank].plan
    times = {label(plan): 12.5, STOCK: 10.25 if stock else 20.0}
    return Result(
        plan=plan, stock=stock, medians_us=times, clock="wall time", date="2026-11-20"
    )


def by_problem(*results: Result) -> dict[Problem, Result]:
    return {each.plan.problem: each for each in results}


def warned(place: Path) -> tuple[dict[Problem, Result], str]:
    """Reads what is not all valid, and returns the one warning too."""
    with pytest.warns(RuntimeWarning, match="are ignored") as caught:
        results = result_files.read(place, HERE).results
    assert len(caught) == 1
    return results, str(caught[0].message)


ROWS_EACH = 12
"""Results that `write_rows` adds."""


def write_rows(place: str, first: int, barrier: Any) -> None:
    """Adds results one by one, in a process of its own."""
    barrier.wait()
    for m in range(first, first + ROWS_EACH):
        result_files.write(Path(place), HERE, [measured(replace(PROBLEM, m=m))])
