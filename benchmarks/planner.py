"""How long choosing a plan takes: for a product seen first, and for one seen before.

The shapes are those of common models at the row counts that the kernels are for. A busy
machine only adds time, so the least of the rounds counts for each product.

Usage: python benchmarks/planner.py
"""

import statistics
import sys
import time
from collections.abc import Callable
from itertools import product

from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.cost import loop_of
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.problem import Problem

CHIPS = ("Apple M1", "Apple M3 Max", "Apple M4 Pro", "Apple M3 Ultra")
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
UNCACHED_LIMIT = 1e-3
"""Seconds for a product that is new."""
CACHED_LIMIT = 2e-6
"""Seconds for one that was chosen before."""


def seconds(
    choose: Callable[[Problem, Device], object],
    problem: Problem,
    device: Device,
    calls: int,
) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            choose(problem, device)
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def choose_afresh(problem: Problem, device: Device) -> object:
    loop_of.cache_clear()
    return planner.choose.__wrapped__(problem, device)


def main() -> int:
    uncached, cached = [], []
    for chip, (n, k), m in product(CHIPS, SHAPES, ROWS):
        asked = Problem(m=m, n=n, k=k), Device.named(chip)
        uncached.append(seconds(choose_afresh, *asked, calls=1))
        planner.choose(*asked)
        cached.append(seconds(planner.choose, *asked, calls=100))
    print(
        f"{len(uncached)} products: uncached median "
        f"{statistics.median(uncached) * 1e3:.2f} ms, slowest "
        f"{max(uncached) * 1e3:.2f} ms (limit {UNCACHED_LIMIT * 1e3:.0f}); cached "
        f"median {statistics.median(cached) * 1e6:.2f} us, slowest "
        f"{max(cached) * 1e6:.2f} us (limit {CACHED_LIMIT * 1e6:.0f})"
    )
    return int(max(uncached) > UNCACHED_LIMIT or max(cached) > CACHED_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
