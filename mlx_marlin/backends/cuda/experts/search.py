"""Plans for experts' products on CUDA devices."""

from dataclasses import replace
from functools import lru_cache

from mlx_marlin.backends.cuda import limits, search
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.experts.plan import CudaGatherPlan
from mlx_marlin.backends.metal.experts.search import chosen_experts
from mlx_marlin.planning.overrides import PlanOverrides
from mlx_marlin.planning.problem import MOST_ELEMENTS, Problem, largest_array

PAIRED = (2, 4, 6, 8)
"""Tiles side by side where a block has as many of gate as of up."""
MOST_PRODUCTS = 64
"""Experts with which blocks are compared: more fill any device as evenly."""


def _most_products(problem: Problem) -> int:
    """Returns how many products of a kind a batch may have."""
    each = largest_array(problem.m, problem.n, problem.k, problem.bits, batch=2) // 2
    return (MOST_ELEMENTS - 1) // each


@lru_cache(maxsize=4096)
def choose_cuda_gather(
    problem: Problem,
    experts: int,
    each: int,
    device: CudaDevice,
    gate: str | None = None,
    bias: bool = False,
) -> CudaGatherPlan:
    """Returns how the products of pairs (row, expert) are computed; cached.

    Blocks are those of a batch of products, one for each expert that is likely to be
    chosen at all.

    Args:
        problem: The product of one expert; its m counts all pairs.
        experts: Weights to choose from.
        each: As in `CudaGatherPlan`.
        device: The device to plan for.
        gate: As in `CudaGatherPlan`; the problem is one of both weights'.
        bias: As in `CudaGatherPlan`.

    Raises:
        ValueError: If our kernels do not multiply in the problem's format.
    """
    # A tile for twice the mean: experts are chosen unevenly.
    fragments = -(-2 * problem.m // (experts * limits.FRAGMENT_ROWS))
    fragments_m = min(max(fragments, 1), limits.FRAGMENTS_M[-1])
    one = replace(problem, m=limits.FRAGMENT_ROWS * fragments_m)
    if gate:
        one = replace(one, n=2 * problem.n)
    chosen = min(round(chosen_experts(problem.m, experts)), MOST_PRODUCTS)
    one = replace(one, batch=max(min(chosen, _most_products(one)), 1))
    overrides: PlanOverrides = {
        "kernel": "mma",
        "strategy": "data_parallel",
        "fragments_m": fragments_m,
    }
    asked: list[PlanOverrides] = [overrides]
    if gate:
        asked = [{**overrides, "simdgroups_n": tiles_n} for tiles_n in PAIRED]
    plan = min(
        (search.make(one, device, wish) for wish in asked),
        key=lambda plan: search.predict(plan, device).seconds,
    )
    return CudaGatherPlan(
        problem=problem,
        experts=experts,
        fragments_m=fragments_m,
        simdgroups_n=plan.simdgroups_n,
        simdgroups_k=plan.simdgroups_k,
        each=each,
        gate=gate,
        bias=bias,
    )
