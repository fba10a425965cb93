"""Benchmarks with bounds print them, and exit 1 when one is missed."""

import math
from types import ModuleType
from typing import Any

import pytest

from benchmarks import bounds, damaged_files, emulator, guard, planner
from mlx_marlin.guard import ENVIRONMENT
from support.marks import needs_emulator


@pytest.mark.parametrize(
    ("limit", "is_kept", "end"),
    [(2e-3, True, "at most 2 ms\n"), (1.9e-3, False, "at most 1.9 ms: MISSED\n")],
)
def test_the_least_sample_is_compared_with_the_bound(
    limit: float, is_kept: bool, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0, 6, 10, 14, 20, 30])  # samples of 6, 4 and 10 s, two calls each
    calls: list[None] = []

    kept = bounds.measure(
        bounds.Bound("work", limit),
        lambda: calls.append(None),
        repeats=3,
        calls=2,
        timer=lambda: next(clock) * 1e-3,
    )

    assert (kept, len(calls)) == (is_kept, 6)
    assert capsys.readouterr().out == f"  work: 2 ms (median 3 ms), {end}"


def bound_planner(limit: float, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "CHIPS", {"Apple M3 Max": limit, "NVIDIA H200": math.inf})
    patch.setattr(planner, "SHAPES", planner.SHAPES[:1])
    patch.setattr(planner, "CACHED_LIMIT", math.inf)


def bound_cached_plans(limit: float, patch: pytest.MonkeyPatch) -> None:
    bound_planner(math.inf, patch)
    patch.setattr(planner, "CACHED_LIMIT", limit)


def bound_guard(limit: float, patch: pytest.MonkeyPatch) -> None:
    patch.setenv(ENVIRONMENT, "1")  # as main sets it
    patch.setattr(guard, "HOST_SECONDS", limit)
    patch.setattr(guard, "TRIES", 1)


def bound_launch(limit: float, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(emulator, "LAUNCH", bounds.Bound("launch", limit))
    patch.setattr(emulator, "ROWS", ())


def bound_damaged_files(limit: float, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(damaged_files, "TWICE", bounds.Bound("twice", limit))


@pytest.mark.parametrize(("limit", "status"), [(math.inf, 0), (-1.0, 1)])
@pytest.mark.parametrize(
    ("benchmark", "bound"),
    [
        (planner, bound_planner),
        (planner, bound_cached_plans),
        (guard, bound_guard),
        (damaged_files, bound_damaged_files),
        pytest.param(emulator, bound_launch, marks=needs_emulator),
    ],
)
def test_a_missed_bound_is_the_exit_status(
    benchmark: ModuleType,
    bound: Any,
    limit: float,
    status: int,
    backend: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend("emulator")  # as main sets it, for the emulator
    bound(limit, monkeypatch)

    assert benchmark.main() == status
