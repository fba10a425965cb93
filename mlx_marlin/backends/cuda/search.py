"""The search for a plan on CUDA, of a product and of experts."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from mlx_marlin.backends.cuda import explicit, limits
from mlx_marlin.backends.cuda.candidates import fewest_fragments, fitting, plans
from mlx_marlin.backends.cuda.cost import predict
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.limits import OF_CUDA
from mlx_marlin.backends.cuda.plan import MAX_PAIRS_PER_ROW, CudaGatherPlan, CudaPlan
from mlx_marlin.planning import search
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import (
    INVARIANT_ROWS,
    MOST_ELEMENTS,
    Problem,
    largest_array,
)
from mlx_marlin.planning.search import Candidate, Prediction
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.work import STRATEGIES
from mlx_marlin.weights.formats import TILE_N


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


GATED_SIMDGROUPS_N = (2, 4, 6, 8)
"""Tiles side by side in a block that computes as many columns of gate as of up."""
MAX_BATCH = 64
"""Limit of the experts that are compared as a batch: more load any device as evenly."""


def _max_batch(problem: Problem) -> int:
    """Returns how many products of this shape a batch may have."""
    elements = largest_array(problem.m, problem.n, problem.k, problem.bits, batch=2)
    return (MOST_ELEMENTS - 1) // (elements // 2)


@lru_cache(maxsize=4096)
def choose_gather(gather: GatherProblem, device: CudaDevice) -> CudaGatherPlan:
    """Returns the plan for experts' products; cached.

    The block is the one that suits a batch of products best, with a product for each
    expert that is expected to be chosen.
    """
    problem = gather.problem
    # A tile for twice the mean: experts are chosen unevenly.
    fragments = -(-2 * problem.m // (gather.experts * limits.FRAGMENT_ROWS))
    fragments_m = min(max(fragments, 1), limits.FRAGMENTS_M[-1])
    batched = replace(problem, m=limits.FRAGMENT_ROWS * fragments_m)
    if gather.gate:
        batched = replace(batched, n=2 * problem.n)
    chosen = min(round(gather.chosen_experts), MAX_BATCH)
    batched = replace(batched, batch=max(min(chosen, _max_batch(batched)), 1))
    overrides: PlanOverrides = {
        "kernel": "mma",
        "strategy": "data_parallel",
        "fragments_m": fragments_m,
    }
    alternatives: list[PlanOverrides] = [overrides]
    if gather.gate:
        alternatives = [
            {**overrides, "simdgroups_n": count} for count in GATED_SIMDGROUPS_N
        ]
    plan = min(
        (make(batched, device, fields) for fields in alternatives),
        key=lambda plan: predict(plan, device).seconds,
    )
    return CudaGatherPlan(
        gather=gather,
        fragments_m=fragments_m,
        simdgroups_n=plan.simdgroups_n,
        simdgroups_k=plan.simdgroups_k,
    )


def gather_unsupported(gather: GatherProblem, device: CudaDevice) -> str | None:
    """Returns why the kernel cannot compute experts' products on a device, or None."""
    problem = gather.problem
    if problem.invariant:
        return "our CUDA kernels take no experts with invariant=True"
    if gather.gate and not _takes_gate(gather):
        return (
            f"our CUDA kernel gates packed experts of whole tiles of {TILE_N} columns, "
            f"with 1 to {MAX_PAIRS_PER_ROW} consecutive pairs of each row"
        )
    words = largest_array(1, gather.experts * problem.n, problem.k, problem.bits)
    if problem.layout == "mlx" and words >= MOST_ELEMENTS:
        return "our CUDA kernels count MLX's words in 32 bits, and there are more"
    return device.unsupported or limits.why_not(problem)


def _takes_gate(gather: GatherProblem) -> bool:
    problem = gather.problem
    is_tiled = problem.layout == "marlin" and problem.n % TILE_N == 0
    return is_tiled and 0 < gather.pairs_per_row <= MAX_PAIRS_PER_ROW
