"""The search for a plan on CUDA."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from mlx_marlin.backends.cuda import explicit, limits
from mlx_marlin.backends.cuda.candidates import fewest_fragments, fitting, plans
from mlx_marlin.backends.cuda.cost import predict
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.planning import search
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.problem import INVARIANT_ROWS, Problem
from mlx_marlin.planning.search import Candidate, Prediction
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.work import STRATEGIES


def candidates(
    problem: Problem, device: CudaDevice, overrides: PlanOverrides
) -> Iterator[Candidate]:
    """Yields the plans to compare, at least one."""
    for plan in _plans(problem, device, overrides):
        predicted = predict(plan, device)
        yield Candidate(_rank(plan, device, predicted), predicted, plan)


def _plans(
    problem: Problem, device: CudaDevice, overrides: PlanOverrides
) -> Iterable[CudaPlan]:
    if problem.invariant and problem.m != INVARIANT_ROWS:
        reference = make(replace(problem, m=INVARIANT_ROWS), device, overrides)
        fragments_m = overrides.get("fragments_m", fewest_fragments(problem, "mma"))
        return [fitting(_with_rows(reference, problem, fragments_m), device)]
    if (reason := limits.why_not(problem)) is not None:
        raise ValueError(reason)
    if overrides:
        return explicit.plans(problem, device, overrides)
    return plans(problem, device)


def make(problem: Problem, device: CudaDevice, overrides: PlanOverrides) -> CudaPlan:
    """Returns the best plan with the given fields."""
    found = search.best(candidates(problem, device, overrides)).plan
    assert isinstance(found, CudaPlan)
    return found


def _rank(plan: CudaPlan, device: CudaDevice, found: Prediction) -> tuple[float, ...]:
    """Returns the sort key of a plan: its time, then its simplicity.

    The time is that of the product alone, as in a chain: what a joined model computes
    next waits for it. Of plans whose times differ by less than `MODEL_ERROR`, the one
    that leaves more multiprocessors to other work may be preferred.
    """
    busy = plan.work.threadgroups - plan.work.idle
    share = min(busy / device.multiprocessors, 1.0)
    return (
        found.seconds
        * (1 + search.MODEL_ERROR * share)
        * search.split_factor(plan.work.is_split),
        found.memory,
        OF_CUDA.index(plan.kernel),
        STRATEGIES.index(plan.work.strategy),
        plan.simdgroups_n,
    )


def _with_rows(plan: CudaPlan, problem: Problem, fragments_m: int) -> CudaPlan:
    """Returns an invariant plan for other rows, with the same division of k."""
    rows = limits.FRAGMENT_ROWS * fragments_m
    tiles = problem.batch * -(-problem.m // rows) * plan.n_tiles
    work = data_parallel(tiles, plan.k_tiles)
    if plan.work.strategy == "split_k":
        work = replace(plan.work, tiles=tiles, threadgroups=tiles * plan.work.slices)
    return replace(
        plan,
        problem=problem,
        tile=replace(plan.tile, m=rows),
        fragments_m=fragments_m,
        work=work,
    )
