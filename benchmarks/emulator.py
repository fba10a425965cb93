"""How long the emulator takes to compile, run, trace and check our kernels, here.

One after the other, each several times. Exits 1 when a bound is missed.

Usage: python -m benchmarks.emulator
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx

import metal_emulator
from benchmarks.bounds import Bound, measure
from metal_emulator.compiling import build
from mlx_marlin import state
from mlx_marlin.backends import graph, planner, selection
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem

ROWS = (8, 16, 32)
WORKERS = 2


LAUNCH = Bound("launch a small kernel", 1e-3)
COMPILE = Bound("compile a kernel", 1.0)
COMPILE_TRACED = Bound("compile it for trace mode", 1.0)
RUN = Bound(f"run, {WORKERS} workers", 1.0)
TRACE = Bound(f"run in trace mode, {WORKERS} workers", 5.0)
CHECK = Bound("static check of a kernel", 1.0)


class Recorder:
    """What a product compiles, and the kernels that it asks MLX for."""

    def __init__(self) -> None:
        self.texts: list[tuple[Any, str, bool]] = []
        self.kernels: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def compile(self, found: Any, text: str, traced: bool = False) -> Path:
        self.texts.append((found, text, traced))
        return self._library(found, text, traced)

    def metal_kernel(self, **kernel: Any) -> Callable[..., list[mx.array]]:
        run = self._metal_kernel(**kernel)

        def call(**arguments: Any) -> list[mx.array]:
            self.kernels.append((kernel, arguments))
            return run(**arguments)

        return call

    def record(self, plan: Plan, arrays: Sequence[mx.array]) -> None:
        """Runs a plan in both modes."""
        self._library = build.kernel_library
        self._metal_kernel = metal_emulator.metal_kernel
        state.reset()
        with ExitStack() as stack:
            stack.enter_context(patch.object(build, "kernel_library", self.compile))
            stack.enter_context(
                patch.object(metal_emulator, "metal_kernel", self.metal_kernel)
            )
            mx.eval(graph.product(plan)(*arrays))
            self.kernels, kernels = [], self.kernels
            with metal_emulator.emulated(trace=True):
                mx.eval(graph.product(plan)(*arrays))
            self.kernels = kernels
        state.reset()


def compile_fresh(found: Any, text: str, traced: bool) -> None:
    """Compiles with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        build.kernel_library(found, text, traced, Path(folder))


def check(kernel: dict[str, Any], call: dict[str, Any]) -> None:
    metal_emulator.check(**kernel, calls=[call])


def measure_launch() -> bool:
    """Measures a call whose kernel copies 32 numbers."""
    kernel = metal_emulator.metal_kernel(
        name="copy",
        input_names=["a"],
        output_names=["out"],
        source="out[thread_position_in_grid.x] = a[thread_position_in_grid.x];",
    )
    a = mx.arange(32)
    mx.eval(a)
    call = {
        "inputs": [a],
        "grid": (32, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [a.shape],
        "output_dtypes": [a.dtype],
    }
    kernel(**call)  # compiles it
    return measure(LAUNCH, lambda: mx.eval(kernel(**call)), repeats=50)


def measure_rows(m: int) -> bool:
    """Measures all of it for m rows of 4096→4096; whether every bound is kept."""
    problem = Problem(m=m, n=4096, k=4096)
    plan = planner.choose(problem, Device.named("Apple M3 Max"))
    x = mx.random.normal((m, 4096)).astype(mx.float16)
    arrays = (x, *mx.quantize(mx.random.normal((4096, 4096)).astype(mx.float16)))
    mx.eval(arrays)
    recorder = Recorder()
    recorder.record(plan, arrays)
    print(f"{plan.kernel}, {m} rows of 4096→4096, float16")
    fine = True
    for found, text, traced in recorder.texts:
        bound = COMPILE_TRACED if traced else COMPILE
        fine &= measure(bound, lambda t=(found, text, traced): compile_fresh(*t))
    product = graph.product(plan)
    fine &= measure(RUN, lambda: mx.eval(product(*arrays)))
    with metal_emulator.emulated(trace=True):
        fine &= measure(TRACE, lambda: mx.eval(product(*arrays)), repeats=2)
    for kernel, call in recorder.kernels:
        fine &= measure(CHECK, lambda c=(kernel, call): check(*c))
    return fine


def main() -> int:
    os.environ[selection.ENVIRONMENT] = "emulator"
    state.reset()
    with metal_emulator.emulated(workers=WORKERS):
        kept = [measure_launch(), *map(measure_rows, ROWS)]
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
