"""How much longer than stock MLX a call of ours takes to build its graph.

Measured while tracing, so no kernel runs: works on any machine. The two calls take
turns, and the least of the medians counts, because a busy machine only adds time.

Usage: python benchmarks/host_overhead.py
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

os.environ["MLX_MARLIN_BACKEND"] = "metal"

import mlx.core as mx
import mlx.nn as nn

import mlx_marlin
from mlx_marlin import launch, source
from mlx_marlin.formats import LAYOUTS

CALLS = 300
ROUNDS = 40
LIMITS = {1: 10.0, 2: 15.0}
"""Microseconds more than stock, by dispatches."""
IMPORT_LIMIT = 50.0
"""Milliseconds more than importing MLX."""
PRODUCTS = ("gemv", "gemm_register", "gemm_staged")
SHAPES = ((8, 4096, 4096), (8, 128, 16384))
"""m, n, k: one whole plan, one that splits k."""


def microseconds(call: Callable[[], mx.array]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def compare(m: int, n: int, k: int) -> tuple[int, float, float]:
    """Returns the dispatches of ours, and microseconds of stock and of ours."""
    x = mx.zeros((m, k), mx.float16)
    native = mx.quantize(mx.zeros((n, k), mx.float16))
    times: dict[str, list[float]] = {"stock": [], "ours": []}

    def trace(x: mx.array) -> mx.array:
        for _ in range(ROUNDS):
            for name, product in (
                ("stock", mx.quantized_matmul),
                ("ours", mlx_marlin.quantized_matmul),
            ):
                times[name].append(microseconds(lambda f=product: f(x, *native)))
        return x

    mx.export_function(lambda _: None, trace, x)
    dispatches = launch.plans_built()[-1].dispatches
    return dispatches, *(min(_fifths(times[name])) for name in ("stock", "ours"))


def _fifths(values: list[float]) -> list[float]:
    size = len(values) // 5
    return [statistics.median(values[i * size : (i + 1) * size]) for i in range(5)]


def import_milliseconds(statement: str) -> float:
    """Returns the least of some fresh interpreters' times for an import statement."""
    code = (
        "import time; start = time.perf_counter(); "
        f"{statement}; print((time.perf_counter() - start) * 1e3)"
    )
    runs = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        for _ in range(7)
    )
    return min(float(run.stdout) for run in runs)


def text_bytes() -> dict[str, int]:
    """Returns the bytes of text that MLX joins and hashes for each Metal kernel."""
    kernels = (
        *(source.product_source(kernel) for kernel in PRODUCTS),
        source.gather_source(),
        source.reduce_source(),
        source.dequantize_source(),
        *map(source.repack_source, LAYOUTS),
    )
    return {text.name: len(text.header) + len(text.source) for text in kernels}


def print_text_bytes() -> None:
    for name, size in text_bytes().items():
        print(f"text of {name}: {size} bytes")


def main() -> int:
    failed = False
    for m, n, k in SHAPES:
        dispatches, stock, ours = compare(m, n, k)
        limit = LIMITS[dispatches]
        failed |= ours - stock > limit
        print(
            f"{m} rows of {k}→{n}, {dispatches} dispatches: stock {stock:.1f} us, "
            f"ours {ours:.1f} us, {ours - stock:.1f} more (limit {limit:.0f})"
        )
    plain = import_milliseconds("import mlx.core, mlx.nn")
    whole = import_milliseconds("import mlx.core, mlx.nn, mlx_marlin")
    failed |= whole - plain > IMPORT_LIMIT
    print(
        f"import: mlx {plain:.0f} ms, with mlx_marlin {whole:.0f} ms, "
        f"{whole - plain:.0f} more (limit {IMPORT_LIMIT:.0f})"
    )
    print_text_bytes()
    return int(failed)


if __name__ == "__main__":
    assert nn  # imported so that its cost is MLX's, not ours
    sys.exit(main())
