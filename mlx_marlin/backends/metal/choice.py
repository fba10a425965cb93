"""The choice among plans: which are offered, and their order."""

from collections.abc import Iterator

from mlx_marlin.backends.metal import explicit
from mlx_marlin.backends.metal.candidates import plans
from mlx_marlin.backends.metal.cost.predict import predict
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.kernel_choice import default_kernel
from mlx_marlin.backends.metal.limits import TENSOR_KERNEL
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.backends.metal.tensor_gates import is_candidate
from mlx_marlin.planning import search
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import Candidate, Prediction
from mlx_marlin.planning.work.work import STRATEGIES

TENSOR_MARGIN = 1 + search.MODEL_ERROR
"""Predicted speedup over our other kernels that `gemm_tensor` needs: gains of such
kernels did not always hold in a chain."""


def candidates(
    problem: Problem, device: Device, overrides: PlanOverrides
) -> Iterator[Candidate]:
    """Yields the plans to compare, as `Backend.candidates`."""
    given = [explicit.plans(problem, device, overrides)] if overrides else None
    for of_kernel in given or _of_kernels(problem, device):
        for plan in of_kernel:
            prediction = predict(plan, device)
            yield Candidate(_rank(plan, prediction), prediction, plan)


def _of_kernels(problem: Problem, device: Device) -> Iterator[Iterator[MetalPlan]]:
    """Yields the plans of each kernel: of `gemm_tensor` too where it may be faster."""
    yield plans(problem, device, default_kernel(problem, device))
    if device.has_tensor_units and is_candidate(problem, device):
        yield plans(problem, device, TENSOR_KERNEL)


def best(
    problem: Problem, device: Device, overrides: PlanOverrides | None = None
) -> MetalPlan:
    """Returns the best plan that has the fields in `overrides`."""
    found = search.best(candidates(problem, device, overrides or {})).plan
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
