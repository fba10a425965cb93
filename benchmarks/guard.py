"""How long a check of the guard takes beside its kernel, and with it on a CUDA device.

Results of zeros replace those of kernels, so that only the host's part is timed, by
the clock of the process. On a CUDA device, checks with their kernels are timed too,
beyond compiling. Exits 1 when a bound is missed.

Usage: python -m benchmarks.guard
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from benchmarks.bounds import Bound, measure
from mlx_marlin import guard, state
from mlx_marlin.backends import devices, graph, planner, selection
from mlx_marlin.guard import known_answers
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.gather_plan import AnyPlan, GatherProblem
from mlx_marlin.planning.problem import problem_of

HOST_SECONDS = 0.010
"""Of a check, of all threads: everything but the kernel and the verdict's file."""
GPU_SECONDS = 0.010
"""Of a check beyond compiling; 14 to 18 ms were measured with an H100 (2026-11-23)."""
TRIES = 16
"""Samples of a check."""
METAL, CUDA = "Apple M3 Max", "NVIDIA H200"
N = K = 4096
EXPERTS = 16


def plans() -> Iterator[AnyPlan]:
    """Yields plans of both back ends in formats whose reference values differ."""
    for mode in ("affine", "nvfp4", "mxfp8"):
        for device in map(devices.named, (METAL, CUDA)):
            for m in (1, 32):
                problem = problem_of(m, N, K, mode=mode, layout="marlin")
                yield planner.choose(problem, device)
            for pairs in (8, 60):
                problem = problem_of(pairs, N, K // 2, mode=mode, layout="marlin")
                gathered = GatherProblem(
                    problem=problem, experts=EXPERTS, pairs_per_row=2
                )
                yield planner.choose_gather(gathered, device)
        gated = replace(
            problem_of(32, N, K, mode=mode, layout="marlin"),
            epilogue=Epilogue(activation="silu", gated=True),
        )
        yield planner.choose(gated, devices.named(CUDA))


def zeros(plan: Any, **_: bool) -> Callable[..., mx.array]:
    """Returns a product whose results are zeros."""
    problem = plan.problem
    shape = *problem.result_shape[:-1], problem.columns
    return lambda *_: mx.zeros(shape, getattr(mx, problem.dtype), stream=mx.cpu)


def check_on_host(plan: AnyPlan) -> None:
    if known_answers.fault_of(plan) is None:
        raise AssertionError(f"zeros pass the check of {plan.explain()}")


def check_on_gpu(plan: AnyPlan) -> None:
    fault = known_answers.fault_of(plan)
    if fault is not None:
        raise AssertionError(f"{plan.explain()}: {fault}")


def time_host() -> bool:
    """Times the host's part of checks; returns whether every bound is kept."""
    bound = Bound("host", HOST_SECONDS)
    with (
        patch.object(graph, "product", zeros),
        patch.object(graph, "gather_product", zeros),
    ):
        return _time(plans(), bound, check_on_host, time.process_time)


def time_gpu() -> bool:
    """Times checks on this machine's CUDA device."""
    here = devices.current()
    problems = (problem_of(m, N, K, layout="marlin") for m in (1, 8, 16, 64))
    chosen = [planner.choose(problem, here) for problem in problems]
    for plan in chosen:
        check_on_gpu(plan)  # MLX keeps what this compiles
    bound = Bound("with its kernels", GPU_SECONDS)
    return _time(chosen, bound, check_on_gpu, time.perf_counter)


def _time(
    plans: Any, bound: Bound, check: Callable[[AnyPlan], None], timer: Any
) -> bool:
    kept = []
    for plan in plans:
        print(plan.explain())
        kept.append(measure(bound, lambda p=plan: check(p), TRIES, timer=timer))
    return all(kept)


def main() -> int:
    os.environ[guard.ENVIRONMENT] = "1"
    state.reset()
    kept = time_host()
    if selection.backend() == "cuda":
        kept &= time_gpu()
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
