"""The choice among plans: which are offered, and their order."""

from collections.abc import Callable, Iterator
from functools import partial

from mlx_marlin.backends.metal import cost, explicit
from mlx_marlin.backends.metal.candidates import default_kernel, plans
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.limits import TENSOR_KERNEL
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.backends.metal.tensor_gates import is_candidate
from mlx_marlin.planning import search
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.prediction import Prediction
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import BestSoFar, Candidate
from mlx_marlin.planning.work import STRATEGIES, Work
from mlx_marlin.planning.work.tiles import Kernel

TENSOR_MARGIN = 1 + search.MODEL_ERROR
"""Predicted speedup over our other kernels that `gemm_tensor` needs: gains of such
kernels did not always hold in a chain."""


def candidates(
    problem: Problem, device: Device, overrides: PlanOverrides, limit: BestSoFar
) -> Iterator[Candidate]:
    """Yields the plans to compare, as `Backend.candidates`.

    Raises:
        ValueError: If no plan has the fields in `overrides`.
    """

    def can_win(body: MetalPlan, work: Work) -> bool:
        seconds = cost.least_seconds(body, device, work.is_split)
        return seconds * search.split_factor(work.is_split) <= limit()

    # With given fields, the error must not depend on predicted times.
    given = explicit.plans(problem, device, overrides) if overrides else None
    for plan in given or _of_kernels(problem, device, can_win):
        prediction = cost.predict(plan, device)
        yield Candidate(_rank(plan, prediction), prediction, plan)


def _of_kernels(
    problem: Problem, device: Device, can_win: Callable[[MetalPlan, Work], bool]
) -> Iterator[MetalPlan]:
    for kernel in kernels(problem, device):
        yield from plans(problem, device, kernel, can_win)


def kernels(problem: Problem, device: Device) -> Iterator[Kernel]:
    """Yields the kernels to compare: `gemm_tensor` too where it may be faster."""
    yield default_kernel(problem)
    if device.has_tensor_units and is_candidate(problem, device):
        yield TENSOR_KERNEL


def best(
    problem: Problem, device: Device, overrides: PlanOverrides | None = None
) -> MetalPlan:
    """Returns the best plan that has the fields in `overrides`."""
    found = search.best(partial(candidates, problem, device, overrides or {}))
    assert isinstance(found, MetalPlan)
    return found


def _rank(plan: MetalPlan, prediction: Prediction) -> tuple[float, ...]:
    """Returns the rank of a plan: its time, then measures of its complexity."""
    margin = TENSOR_MARGIN if plan.has_tensor_operations else 1.0
    return (
        prediction.seconds * search.split_factor(plan.is_split) * margin,
        plan.dispatches,
        STRATEGIES.index(plan.work.strategy),
        plan.simdgroups_k,
        plan.num_threadgroups,
    )
