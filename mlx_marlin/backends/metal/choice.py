"""The choice among plans: which are offered, and their order."""

from collections.abc import Iterator
from functools import partial

from mlx_marlin.backends.metal import cost
from mlx_marlin.backends.metal.candidates import candidates
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.limits import KERNELS, TENSOR_KERNEL
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.backends.metal.tensor_gates import is_candidate
from mlx_marlin.planning import search
from mlx_marlin.planning.overrides import PlanOverrides
from mlx_marlin.planning.prediction import Prediction
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import BestSoFar, Option
from mlx_marlin.planning.work import STRATEGIES, Work

TENSOR_MARGIN = 1 + search.MODEL_ERROR
"""Predicted speedup over our other kernels that `gemm_tensor` needs: gains of such
kernels did not always hold in a chain."""


def options(
    problem: Problem, device: Device, overrides: PlanOverrides, limit: BestSoFar
) -> Iterator[Option]:
    """Yields the plans to compare, as `Backend.options`.

    Raises:
        ValueError: If no plan has the fields in `overrides`.
    """
    kernel = overrides.get("kernel", KERNELS[0])
    if kernel not in KERNELS:
        raise ValueError(
            f"kernel={kernel!r} is not one of Metal's, {KERNELS}; others need "
            f"another device, such as chip='NVIDIA H200'"
        )
    if kernel == TENSOR_KERNEL and not device.has_tensor_units:
        raise ValueError(
            f"kernel={kernel!r} needs tensor operations, and {device.variant} has "
            f"none: expected an M5 or later with macOS 26.2 or later"
        )

    def can_win(body: MetalPlan, work: Work) -> bool:
        if overrides:
            return True  # the error must not depend on predicted times
        seconds = cost.least_seconds(body, device, work.is_split)
        return seconds * search.split_factor(work.is_split) <= limit()

    for given in kernel_overrides(problem, device, overrides):
        for plan in candidates(problem, device, given, can_win):
            prediction = cost.predict(plan, device)
            yield Option(_rank(plan, prediction), prediction, partial(_same, plan))


def best(problem: Problem, device: Device, overrides: PlanOverrides) -> MetalPlan:
    """Returns the best plan that has the fields in `overrides`."""
    found = search.best(partial(options, problem, device, overrides))
    assert isinstance(found, MetalPlan)
    return found


def kernel_overrides(
    problem: Problem, device: Device, overrides: PlanOverrides
) -> Iterator[PlanOverrides]:
    """Yields the overrides, and those of `gemm_tensor` if it is a candidate."""
    yield overrides
    if not overrides and device.has_tensor_units and is_candidate(problem, device):
        yield PlanOverrides(kernel=TENSOR_KERNEL)


def _same(plan: MetalPlan) -> MetalPlan:
    return plan


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
