"""The choice among plans: which are offered, their order, and what a tuner adds.

Each gate of `gemm_tensor` excludes products for which published kernels with tensor
operations gained nothing or lost (docs/m5.md): few rows, small products, and slower
chips.
"""

from collections.abc import Iterator
from typing import Any

from mlx_marlin.backends.metal import candidates as bodies
from mlx_marlin.backends.metal.candidates import plans
from mlx_marlin.backends.metal.cost import predict
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.kernel_limits import (
    FRAGMENTS_M,
    GEMV_ROWS,
    KERNELS,
    OPERATION_FRAGMENTS,
    TENSOR_KERNEL,
    THREADGROUP_LIMIT,
    THREE_FRAGMENTS_M,
    default_kernel,
    has_registers,
)
from mlx_marlin.backends.metal.plan import MetalPlan, buffer_bytes, tensor_reason
from mlx_marlin.planning import explicit, search
from mlx_marlin.planning.explicit import STAGED, WORK_FIELDS, PlanOverrides
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import Candidate, Prediction
from mlx_marlin.planning.work.decompositions import WideWork
from mlx_marlin.planning.work.tiles import FRAGMENT, Kernel, step_k
from mlx_marlin.planning.work.work import STRATEGIES
from mlx_marlin.weights.formats import TILE_N

LEAST_ROWS = 6
"""Fewest rows. Published vector kernels win at 1 to 5."""
MOST_ROWS = 64
"""Most rows: those of the largest tile, for which a weight is read once."""
LEAST_OF_SLOWER_CHIPS = 9
"""Fewest rows on chips with fewer cores than a Max, where 8x8 products won at 5 to 8
(M5 and M5 Pro, krcm0209/sous)."""
FEW_ROWS = 11
"""Most rows that need a large weight."""
LARGE_WEIGHT = 16e6
"""Weights of a large one: 1024x2048 lost 19 to 20 % at 8 rows (pierre427/mlx2)."""
LEAST_COLUMNS = 2048
"""Fewest columns. Key and value projections of 1024 gained nothing (mlx-serve#99)."""


def is_candidate(problem: Problem, device: Device) -> bool:
    """Returns whether plans of `gemm_tensor` are compared with others."""
    if tensor_reason(problem) is not None:
        return False
    fast = device.tier in ("max", "ultra")
    least = LEAST_ROWS if fast else LEAST_OF_SLOWER_CHIPS
    weights = problem.batch * problem.n * problem.k
    return (
        least <= problem.m <= MOST_ROWS
        and problem.batch * problem.n >= LEAST_COLUMNS
        and (problem.m > FEW_ROWS or weights >= LARGE_WEIGHT)
        and not problem.invariant
    )


TENSOR_MARGIN = 1 + search.MODEL_ERROR
"""Predicted speedup over our other kernels that `gemm_tensor` needs: gains of such
kernels did not always hold in a chain."""


def candidates(
    problem: Problem, device: Device, overrides: PlanOverrides
) -> Iterator[Candidate]:
    """Yields the plans to compare, as `Backend.candidates`."""
    given = [plans_with(problem, device, overrides)] if overrides else None
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


OF_BODY = ("fragments_m", "simdgroups_m", "operand", "buffers", "loaders")
"""Fields that all plans have in common."""
DEFAULT_BUFFERS = 2
"""Buffers of `gemm_staged` if they fit: the fewest with one barrier per stage."""


def plans_with(
    problem: Problem, device: Device, overrides: PlanOverrides
) -> Iterator[MetalPlan]:
    """Yields the plans with the given fields, at least one."""
    kernel = overrides.get("kernel", default_kernel(problem, device))
    _check_kernel(kernel, device)
    given: dict[str, Any] = {
        name: value for name, value in overrides.items() if name in OF_BODY
    }
    if kernel == "gemm_staged":
        given.setdefault("buffers", _buffers(problem, overrides))
    body = bodies.body_of(problem, device, kernel, **given)
    reduction, simdgroups_k = overrides.get("reduction"), overrides.get("simdgroups_k")
    if problem.invariant and not WORK_FIELDS & overrides.keys():
        work, simdgroups_n, count = bodies.invariant_work(body, device)
        count = count if simdgroups_k is None else simdgroups_k
        yield bodies.with_work(body, work, simdgroups_n, count, reduction)
        return
    works = _works(body, device, overrides)
    works = [pair for pair in works if explicit.can_meet(pair[0], overrides)]
    if not works:
        raise explicit.nothing_fits(overrides)
    for work, simdgroups_n in works:
        count = (
            bodies.simdgroups_along_k(body, work, device, simdgroups_n)
            if simdgroups_k is None
            else simdgroups_k
        )
        yield bodies.with_work(body, work, simdgroups_n, count, reduction)


def _works(body: MetalPlan, device: Device, overrides: PlanOverrides) -> list[WideWork]:
    widest = overrides.get("simdgroups_k")
    if not WORK_FIELDS & overrides.keys():
        return bodies.works_of(body, device, widest)
    works = explicit.works(bodies.grid_of(body, device, widest), overrides)
    if body.problem.epilogue.gated or body.problem.norm is not None:
        return [(work, body.simdgroups_n) for work, _ in works]
    return works


def _check_kernel(kernel: Kernel, device: Device) -> None:
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


def _buffers(problem: Problem, overrides: PlanOverrides) -> int:
    """Returns the number of buffers that fits in memory next to the given fields."""
    rows = FRAGMENT * overrides.get("fragments_m", 1) * overrides.get("simdgroups_m", 1)
    k = step_k(problem.group_size) * overrides.get("simdgroups_k", 1)
    size = buffer_bytes(rows, TILE_N, k, problem.fragment_bytes)
    return DEFAULT_BUFFERS if DEFAULT_BUFFERS * size <= THREADGROUP_LIMIT else 1
