"""The plans that a tuner compares and the model does not choose."""

from collections.abc import Iterator

from mlx_marlin.backends.metal.choice import best
from mlx_marlin.backends.metal.cost.predict import predict
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.kernel_choice import has_registers
from mlx_marlin.backends.metal.limits import (
    FRAGMENTS_M,
    GEMV_ROWS,
    OPERATION_FRAGMENTS,
    TENSOR_KERNEL,
    THREE_FRAGMENTS_M,
)
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.explicit import STAGED, PlanOverrides
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT

EXPERIMENT_CUTOFF = 1.25
"""The tuner tries plans up to this many times the chosen plan's predicted time."""


def experiments(problem: Problem, device: Device) -> list[Plan]:
    """Returns further plans for a tuner, as `Backend.experiments`."""
    chosen = best(problem, device)
    limit = EXPERIMENT_CUTOFF * predict(chosen, device).seconds
    larger, staged = _larger(problem, chosen, device), _staged(problem, chosen)
    found = (best(problem, device, overrides) for overrides in (*larger, *staged))
    close: list[Plan] = [
        plan for plan in found if predict(plan, device).seconds <= limit
    ]
    # What these are for is no part of a prediction, so it leaves none out.
    return close + [best(problem, device, overrides) for overrides in _smaller(chosen)]


def _larger(
    problem: Problem, chosen: MetalPlan, device: Device
) -> Iterator[PlanOverrides]:
    """Yields variants with more registers than the model chooses by itself.

    Apple's compiler may need fewer than were counted. For 17 to 24 rows one simdgroup
    has 5 % fewer slots than two, and each has more registers.
    """
    if problem.invariant or chosen.kernel != "gemm_register":
        return
    if problem.m <= GEMV_ROWS[problem.dtype]:
        yield PlanOverrides(kernel="gemv")
    elif chosen.fragments_m == 1 and problem.m > FRAGMENT:
        yield PlanOverrides(fragments_m=max(FRAGMENTS_M))
    three = -(-problem.m // FRAGMENT) == THREE_FRAGMENTS_M
    if (
        three
        and problem.dtype != "float32"
        and has_registers(problem, device, THREE_FRAGMENTS_M)
    ):
        yield PlanOverrides(fragments_m=THREE_FRAGMENTS_M, simdgroups_m=1)


def _smaller(chosen: MetalPlan) -> Iterator[PlanOverrides]:
    """Yields `gemm_tensor` with one operation a simdgroup if the model chooses two.

    Apple's compiler may need more registers than the hand count.
    """
    if chosen.has_tensor_operations and chosen.fragments_m > OPERATION_FRAGMENTS:
        yield PlanOverrides(kernel=TENSOR_KERNEL, fragments_m=OPERATION_FRAGMENTS)


def _staged(problem: Problem, chosen: MetalPlan) -> Iterator[PlanOverrides]:
    """Yields those of `gemm_staged`, if several simdgroups decode the same weights."""
    whole = problem.invariant or problem.epilogue.gated
    if chosen.simdgroups_m == 1 or whole or problem.batch > 1:
        return
    for buffers, loaders in STAGED:
        yield PlanOverrides(kernel="gemm_staged", buffers=buffers, loaders=loaders)
