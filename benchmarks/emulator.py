"""How long the emulator takes to compile a kernel and to run it, on this machine.

Usage: python benchmarks/emulator.py
"""

import os
import sys
import time

os.environ["MLX_MARLIN_BACKEND"] = "emulator"

import mlx.core as mx

from mlx_marlin import launch, scheduler
from mlx_marlin.device import Device
from mlx_marlin.emulator import emulated
from mlx_marlin.plan import Plan
from mlx_marlin.problem import Problem

RUN_LIMIT = 1.0
"""Seconds of `gemm_register` at 8 rows of 4096→4096, compiled, with two workers."""
COMPILE_LIMIT = 1.0
"""Seconds to compile one kernel once the compiler is warm."""
ROWS = (1, 8, 16, 32)
REPEATS = 5


def seconds(plan: Plan, arrays: tuple[mx.array, ...]) -> float:
    product = launch.product(plan)
    start = time.perf_counter()
    mx.eval(product(*arrays))
    return time.perf_counter() - start


def measure(m: int) -> tuple[Plan, float, float]:
    """Returns the plan of m rows of 4096→4096, and seconds of the first and best run.

    The first run compiles, unless this version's kernel is in the user's cache already.
    """
    problem = Problem(m=m, n=4096, k=4096)
    plan = scheduler.choose(problem, Device.named("Apple M3 Max"))
    x = mx.random.normal((m, 4096)).astype(mx.float16)
    arrays = (x, *mx.quantize(mx.random.normal((4096, 4096)).astype(mx.float16)))
    mx.eval(arrays)
    first = seconds(plan, arrays)
    return plan, first, min(seconds(plan, arrays) for _ in range(REPEATS))


def main() -> int:
    failed = False
    with emulated(workers=2):
        for m in ROWS:
            plan, first, best = measure(m)
            failed |= plan.kernel == "gemm_register" and m == 8 and best > RUN_LIMIT
            failed |= first - best > COMPILE_LIMIT
            print(
                f"{plan.kernel}, {m} rows of 4096→4096, float16: {best:.3f} s on 2 "
                f"workers, first run {first - best:+.2f} s"
            )
    print(f"limits: {RUN_LIMIT} s at 8 rows, {COMPILE_LIMIT} s to compile")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
