"""How long choosing a plan takes: for a product seen first, and for one seen before.

The shapes are those of common models at the row counts that the kernels are for. A busy
machine only adds time, so the least of the rounds counts for each product. Exits 1 when
a limit is missed.

Usage: python benchmarks/planner.py
"""

import statistics
import sys
import time
from collections.abc import Callable
from itertools import product

from mlx_marlin.backends import devices, planner
from mlx_marlin.backends.metal.main_loop import loop_of
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.problem import Problem

CHIPS = {
    "Apple M1": 1e-3,
    "Apple M3 Max": 1e-3,
    "Apple M4 Pro": 1e-3,
    "Apple M3 Ultra": 1e-3,
    "NVIDIA H200": 5e-3,
}
"""Chip -> most seconds for a product that is new."""
SHAPES = (
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (128256, 4096),
    (2560, 9728),
    (896, 4864),
    (17408, 5120),
    (5120, 17408),
)
"""n, k."""
ROWS = (1, 4, 8, 16, 33, 64)
ROUNDS = 7
CACHED_LIMIT = 2e-6
"""Most seconds for a product that was chosen before."""


def seconds(
    choose: Callable[[Problem, PlanningDevice], object],
    problem: Problem,
    device: PlanningDevice,
    calls: int,
) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            choose(problem, device)
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def choose_afresh(problem: Problem, device: PlanningDevice) -> object:
    loop_of.cache_clear()
    return planner.propose.__wrapped__(problem, device)


def times_within(chip: str) -> bool:
    """Prints the times of a chip's plans, and returns whether they keep the limits."""
    uncached, cached = [], []
    for (n, k), m in product(SHAPES, ROWS):
        # Equal, not identical, for the cache: as in a call.
        problem, again = Problem(m=m, n=n, k=k), Problem(m=m, n=n, k=k)
        device = devices.named(chip)
        uncached.append(seconds(choose_afresh, problem, device, calls=1))
        planner.choose(problem, device)
        cached.append(seconds(planner.choose, again, device, calls=100))
    limit = CHIPS[chip]
    print(
        f"{chip}, {len(uncached)} products: uncached median "
        f"{statistics.median(uncached) * 1e3:.2f} ms, slowest "
        f"{max(uncached) * 1e3:.2f} ms (limit {limit * 1e3:g}); cached "
        f"median {statistics.median(cached) * 1e6:.2f} us, slowest "
        f"{max(cached) * 1e6:.2f} us (limit {CACHED_LIMIT * 1e6:g})"
    )
    return max(uncached) <= limit and max(cached) <= CACHED_LIMIT


def main() -> int:
    kept = [times_within(chip) for chip in CHIPS]
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
