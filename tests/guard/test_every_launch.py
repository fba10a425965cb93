"""A check finds a fault that only one of its launches has, in one result."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import metal_emulator
from mlx_marlin import guard, state
from mlx_marlin.backends import kernels, planner
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal import probes as metal_probes
from mlx_marlin.guard import known_answers
from mlx_marlin.planning.block_plans import (
    AddNormPlan,
    CombinePlan,
    HeadsPlan,
    RepackPlan,
    RoutePlan,
)
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.epilogue import Heads
from mlx_marlin.planning.gather_plan import GatherPlan, GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import problem_of
from support.guarded_calls import DEVICE, K, N
from support.marks import needs_emulator

pytestmark = needs_emulator
HEADS = Heads(heads=2, kv_heads=1, features=32, columns=128, norm=1e-6)
PROBLEM = problem_of(9, N, K)


def split_plan(**options: Any) -> Plan:
    split = {"strategy": "split_k", "k_parallel": 2, **options}
    return planner.make(PROBLEM, device=DEVICE, kernel="gemm_register", **split)


def plan_of_experts() -> GatherPlan:
    gather = GatherProblem(problem=replace(PROBLEM, m=8), experts=4, pairs_per_row=2)
    return planner.choose_gather(gather, DEVICE)


PLANS: dict[str, tuple[int, Any]] = {
    # Five plans and a NaN, each with its partial sums.
    "products": (12, split_plan()),
    "decoded weights": (5, dequantize_plan(PROBLEM)),
    "experts": (1, plan_of_experts()),
    "repacked codes": (1, RepackPlan(to="marlin", n=N, k=K, bits=4, group_size=64)),
    "rotated heads": (2, HeadsPlan(HEADS, "float16", 2, 2, True)),
    "added rows": (1, AddNormPlan(1, "float16", 72, 1e-5)),
    "routing": (1, RoutePlan(1, "float16", 20, 3, False, False)),
    "combining": (2, CombinePlan(1, "float16", 40, 3)),
}
"""Launches of a check, and the plan that is checked."""


class OneWrong:
    """Kernels one of whose results is wrong: that of a launch, by its index there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wrong: tuple[int, int] | None = None
        self.results: list[int] = []
        patch.setattr(kernels, "_factory", lambda: self._factory)
        state.reset()  # of kernels that were built before

    def _factory(self, **texts: Any) -> Callable[..., list[mx.array]]:
        kernel = metal_emulator.metal_kernel(**texts)

        def launch(**arguments: Any) -> list[mx.array]:
            results: list[mx.array] = kernel(**arguments)
            nth = len(self.results)
            self.results.append(len(results))
            return [
                _changed(each) if (nth, index) == self.wrong else each
                for index, each in enumerate(results)
            ]

        return launch

    def fault(self, plan: Any, wrong: tuple[int, int] | None = None) -> str | None:
        """Checks a plan of which one result is wrong, or none."""
        self.wrong = wrong
        self.results.clear()
        return known_answers.fault_of(plan)


def _changed(y: mx.array) -> mx.array:
    return ~y if y.dtype == mx.uint32 else (y + y).astype(y.dtype)


@pytest.mark.parametrize("name", PLANS)
def test_every_result_of_every_launch_is_compared(
    name: str, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, plan = PLANS[name]
    faulty = OneWrong(monkeypatch)
    assert faulty.fault(plan) is None
    assert len(faulty.results) == launches

    every = [(nth, j) for nth, count in enumerate(faulty.results) for j in range(count)]
    assert [each for each in every if faulty.fault(plan, each) is None] == []


@pytest.mark.parametrize("wrong", range(3))
def test_a_kernel_needs_all_of_its_probes(
    wrong: int, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = named("Apple M5 Max")
    problem = problem_of(16, 4096, 4096)
    plan = planner.make(problem, device=device, kernel="gemm_tensor")
    probes = metal_probes.probes(plan)
    assert len(probes) == 3
    faults = [lambda _: None] * 3
    faults[wrong] = lambda _: "planted"
    changed = [
        replace(probe, fault=fault) for probe, fault in zip(probes, faults, strict=True)
    ]
    monkeypatch.setattr(metal_probes, "probes", lambda _: changed)

    with pytest.warns(RuntimeWarning, match="planted"):
        reason = guard.why_not(plan)

    assert "planted" in str(reason)
    assert guard.known_fault(plan) == reason
