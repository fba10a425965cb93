"""Computes a 4-bit product in steps, from a naive kernel to the package's own.

Run it from the repository's root:

    python examples/naive_to_marlin/run.py
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_marlin
from metal_emulator import Counters, check, emulated, trace

FOLDER = Path(__file__).parent
N, K, GROUP = 128, 1024, 64
TOLERANCE = 1e-3  # relative, of results in float16
INPUTS = ("w", "x", "scales", "biases")
COLUMNS = (
    "kernel",
    "rows",
    "simdgroups",
    "loads",
    "w KiB",
    "x KiB",
    "scales KiB",
    "lines KiB",
    "exchanges",
    "barriers",
)


@dataclass(frozen=True)
class Step:
    """A kernel of this folder and its launch.

    Attributes:
        name: Name of the file.
        simdgroups: Simdgroups of the launch.
        threadgroup: Simdgroups of a threadgroup.
        packed: Whether the kernel reads the packed weight.
        rows: Rows of x.
    """

    name: str
    simdgroups: int
    threadgroup: int = 1
    packed: bool = False
    rows: int = 1


STEPS = (
    Step("01_naive", N // 32),
    Step("02_simdgroup_per_row", N),
    Step("03_wide_loads", N),
    Step("04_factored", N),
    Step("05_reuse_x", N // 4),
    Step("06_packed", N // 32, packed=True),
    Step("07_split_k", N // 8, threadgroup=4, packed=True),
    Step("08_few_rows", N // 8, threadgroup=4, packed=True, rows=4),
)


class Product:
    """Random operands of y = x @ w.T, and the result in float64."""

    def __init__(self) -> None:
        mx.random.seed(0)
        self.x = mx.random.normal((4, K)).astype(mx.float16)
        w = mx.random.normal((N, K)).astype(mx.float16)
        self.native = mx.quantize(w, group_size=GROUP, bits=4)
        self.packed = mlx_marlin.pack(*self.native, group_size=GROUP, bits=4)
        self.exact = np.array(self.x, np.float64) @ self._weight().T

    def _weight(self) -> np.ndarray:
        words, scales, biases = map(np.array, self.native)
        codes = words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
        groups = codes.reshape(N, K // GROUP, GROUP).astype(np.float64)
        return (groups * scales[..., None] + biases[..., None]).reshape(N, K)

    def check(self, y: mx.array) -> None:
        """Raises ArithmeticError if a result is too far from that in float64."""
        exact = self.exact[: y.shape[0]]
        difference = np.linalg.norm(np.array(y, np.float64) - exact)
        error = difference / np.linalg.norm(exact)
        if not error < TOLERANCE:
            raise ArithmeticError(f"relative error {error:.1e}, limit {TOLERANCE}")


def definition(step: Step) -> dict[str, Any]:
    """Returns the arguments of `mx.fast.metal_kernel`."""
    biases = [] if step.packed else ["biases"]  # packed scales contain them
    return {
        "name": f"step_{step.name}",
        "input_names": ["x", "w", "scales", *biases],
        "output_names": ["y"],
        "source": (FOLDER / f"{step.name}.metal").read_text(encoding="utf-8"),
    }


def call(step: Step, product: Product) -> dict[str, Any]:
    """Returns the arguments of a kernel's call."""
    packed = product.packed.words, product.packed.scales
    return {
        "inputs": [
            product.x[: step.rows],
            *(packed if step.packed else product.native),
        ],
        "template": [("N", N), ("K", K), ("GROUP", GROUP), ("ROWS", step.rows)],
        "grid": (32 * step.simdgroups, 1, 1),
        "threadgroup": (32 * step.threadgroup, 1, 1),
        "output_shapes": [(step.rows, N)],
        "output_dtypes": [mx.float16],
    }


def multiply(step: Step, product: Product) -> mx.array:
    """Launches the kernel of a step."""
    (y,) = mx.fast.metal_kernel(**definition(step))(**call(step, product))
    return y


def multiply_by_ours(rows: int, product: Product) -> mx.array:
    """Launches the package's kernel."""
    return mlx_marlin.quantized_matmul(product.x[:rows], product.packed)


def counted(compute: Callable[[], mx.array], product: Product) -> Counters:
    """Returns the counters of one launch, whose result must be correct."""
    results: list[mx.array] = []
    (counters,) = trace(lambda: results.append(compute()))
    product.check(results[0])
    return counters


def row_of_table(name: str, rows: int, simdgroups: int, found: Counters) -> list[str]:
    """Returns the cells of a kernel's row in the table."""
    inputs = [each for each in found.memories() if each.memory in INPUTS]
    read = {"w": 0, "x": 0, "scales": 0}
    for each in inputs:
        memory = each.memory.replace("biases", "scales")
        read[memory] += each.read_bytes + each.repeated_read_bytes
    numbers = [
        rows,
        simdgroups,
        sum(each.accesses for each in inputs),
        *(number // 1024 for number in read.values()),
        sum(each.lines_128 for each in inputs) * 128 // 1024,
        found.count("simd") + found.count("shuffle"),
        found.count("barrier"),
    ]
    return [name, *map(str, numbers)]


def aligned(table: list[list[str]]) -> str:
    """Returns a table as text."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in table
    )


def main() -> None:
    """Checks, runs and counts every step, and the package's kernel."""
    os.environ["MLX_MARLIN_BACKEND"] = "emulator"  # on a Mac too: only it counts
    product = Product()
    table = [list(COLUMNS)]
    with emulated():
        for step in STEPS:
            check(**definition(step), calls=[call(step, product)])
            found = counted(partial(multiply, step, product), product)
            table.append(row_of_table(step.name, step.rows, step.simdgroups, found))
    for rows in (1, 4):
        plan = mlx_marlin.plan(rows, N, K, group_size=GROUP, layout="marlin").plan
        found = counted(partial(multiply_by_ours, rows, product), product)
        simdgroups = found.threadgroups * math.prod(plan.simdgroup_grid)
        table.append(row_of_table(f"ours: {plan.kernel}", rows, simdgroups, found))
    print(aligned(table))
    print(f"\nEvery result is within {TOLERANCE} of float64.")


if __name__ == "__main__":
    main()
