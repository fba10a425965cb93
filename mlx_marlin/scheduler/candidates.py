"""The plans worth comparing for one product, and how a user's wishes narrow them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypedDict

from mlx_marlin.device import Device
from mlx_marlin.plan import (
    FRAGMENT,
    GEMV_ROWS,
    MAX_SIMDGROUPS,
    Kernel,
    Partition,
    Plan,
    Strategy,
    Tile,
)
from mlx_marlin.problem import Problem
from mlx_marlin.scheduler.cost import SIMDGROUPS_TO_FILL

ROWS_OF_ONE_FRAGMENT = 8
"""Up to so many rows a simdgroup holds one row fragment, beyond two: they share one
decode of the weights. A pair's second half past the last row is left out."""
MAX_SIMDGROUPS_M = 4
"""Simdgroups side by side: tiles of up to 64 rows, with room for two along k."""
SIMDGROUPS_K = (1, 2, 4, 8)
"""Simdgroups that may share a unit's k."""
THREADGROUPS_PER_CORE = (1, 2, 4, 8, 16)
"""Threadgroups that a stripe aims at for each core."""


class Wishes(TypedDict, total=False):
    """Fields of a plan that are not to be chosen; the rest follows from them."""

    kernel: Kernel
    fragments_m: int
    simdgroups_m: int
    simdgroups_k: int
    strategy: Strategy
    partition: Partition
    k_parallel: int
    num_threadgroups: int
    subtract: bool


def candidates(problem: Problem, device: Device, wishes: Wishes) -> Iterator[Plan]:
    """Yields the plans to compare, at least one.

    Raises:
        ValueError: If a wish makes no plan, as `Plan` says it.
    """
    body = _body(problem, wishes)
    strategy = wishes.get("strategy")
    for k_parallel, threadgroups in _spreads(body, device, wishes):
        whole = k_parallel == 1 and threadgroups == body.units
        natural: Strategy = "data_parallel" if whole else "stripe"
        count = _simdgroups_k(body, device, k_parallel, threadgroups)
        yield replace(
            body,
            simdgroups_k=wishes.get("simdgroups_k", count),
            strategy=strategy or natural,
            partition=wishes.get("partition", "balanced"),
            k_parallel=k_parallel,
            num_threadgroups=threadgroups,
        )


def _body(problem: Problem, wishes: Wishes) -> Plan:
    """Returns what a threadgroup looks like, as the plan with one for each tile."""
    kernel = wishes.get("kernel", _kernel(problem))
    fragments_m = wishes.get("fragments_m", _fragments_m(problem, kernel))
    simdgroups_m = wishes.get("simdgroups_m", _simdgroups_m(problem, fragments_m))
    rows = problem.m if kernel == "gemv" else FRAGMENT * fragments_m * simdgroups_m
    tile = Tile(m=rows)
    return Plan(
        problem=problem,
        kernel=kernel,
        tile=tile,
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        strategy="data_parallel",
        num_threadgroups=-(-problem.m // tile.m) * -(-problem.n // tile.n),
        subtract=wishes.get("subtract", _subtract(problem, fragments_m)),
    )


def _kernel(problem: Problem) -> Kernel:
    """Returns the kernel with fewer slots: dot products up to a few rows."""
    return "gemv" if problem.m <= GEMV_ROWS[problem.dtype] else "gemm_register"


def _fragments_m(problem: Problem, kernel: Kernel) -> int:
    """Returns how many fragments of 8 rows a simdgroup holds."""
    if kernel == "gemv":
        return 0
    return 1 if problem.m <= ROWS_OF_ONE_FRAGMENT else 2


def _subtract(problem: Problem, fragments_m: int) -> bool:
    """Returns whether codes lose their offset first, the more exact form.

    Where x is widened to float32, converting the codes does it at no cost. In half it
    costs 9 % with one fragment, 4 % with two (counted); in float32 results it shows.
    """
    if fragments_m == 0:
        return problem.dtype == "float32"
    return fragments_m >= 2 or problem.dtype != "float16"


def _simdgroups_m(problem: Problem, fragments_m: int) -> int:
    """Returns how many simdgroups cover the rows side by side."""
    if fragments_m == 0:
        return 1
    return min(-(-problem.m // (FRAGMENT * fragments_m)), MAX_SIMDGROUPS_M)


def _spreads(body: Plan, device: Device, wishes: Wishes) -> Iterator[tuple[int, int]]:
    """Yields ways to spread a body's tiles: (k_parallel, num_threadgroups)."""
    tiles = body.units
    if wishes.get("strategy") == "data_parallel":
        yield wishes.get("k_parallel", 1), wishes.get("num_threadgroups", tiles)
        return
    targets = [device.cores * count for count in THREADGROUPS_PER_CORE]
    slices = {1, *(min(-(-target // tiles), body.cuts) for target in targets)}
    for k_parallel in [wishes["k_parallel"]] if "k_parallel" in wishes else slices:
        units = tiles * k_parallel
        # One threadgroup a unit, or runs of several for as many as the cores want.
        counts = {units, *(target for target in targets if target < units)}
        if "num_threadgroups" in wishes:
            counts = {wishes["num_threadgroups"]}
        for threadgroups in sorted(counts):
            yield k_parallel, threadgroups


def _simdgroups_k(
    body: Plan, device: Device, k_parallel: int, threadgroups: int
) -> int:
    """Returns the fewest simdgroups along k that fill a core, or as many as can be.

    Never more than the trips of a slice: the others would have no work.
    """
    trips = body.cuts // max(k_parallel, 1) * (body.cut // body.tile.k)
    most = max(1, min(MAX_SIMDGROUPS // body.simdgroups_m, trips))
    busy = min(threadgroups, body.units * k_parallel)
    turns = max(-(-busy // device.cores), 1)
    allowed = [count for count in SIMDGROUPS_K if count <= most]
    filling = (
        count
        for count in allowed
        if turns * body.simdgroups_m * count >= SIMDGROUPS_TO_FILL
    )
    return next(filling, allowed[-1])
