"""One product on our kernels, on MLX's and on mlx-dspark's, counted in the emulator.

Each count of a launch is a sum over its threadgroups, and those that compute equally
many columns do the same. So a product with few columns is run, in the same kernel,
tiles and parts of k, and multiplied. `exact` runs all columns instead.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.stock.kernels import stock_call
from metal_emulator import Counters, trace
from mlx_marlin.backends import graph, planner
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.launches import launches
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.work import Work
from mlx_marlin.weights.formats import TILE_N

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from peers import dspark, mlx_geometry, mlx_headers
from peers.mlx_products import Operands, Product
from support import drawn_arrays

COLUMNS = 64
"""Columns that are run of MLX's and mlx-dspark's kernels: whole threadgroups."""
RIVAL_ROWS = 16
"""Rows of a threadgroup of `skinny_qmm`, at most."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Totals of the launches of a product.

    Attributes:
        kernel: The kernel's name.
        matrix: 8x8 products.
        bytes: Bytes of device memory that simdgroups request, repeated ones left out.
        lane_bytes: Bytes that loads return to lanes, from any memory.
        threads: Threads.
    """

    kernel: str
    matrix: int
    bytes: int
    lane_bytes: int
    threads: int

    def times(self, factor: int) -> "Counted":
        """Returns the totals of so many equal launches."""
        return Counted(
            kernel=self.kernel,
            matrix=factor * self.matrix,
            bytes=factor * self.bytes,
            lane_bytes=factor * self.lane_bytes,
            threads=factor * self.threads,
        )

    def __add__(self, other: "Counted") -> "Counted":
        return Counted(
            kernel=self.kernel,
            matrix=self.matrix + other.matrix,
            bytes=self.bytes + other.bytes,
            lane_bytes=self.lane_bytes + other.lane_bytes,
            threads=self.threads + other.threads,
        )


def _counted(
    kernel: str, threads: int, run: Callable[[], mx.array]
) -> tuple[Counted, mx.array]:
    results: list[mx.array] = []

    def evaluated() -> None:
        results.append(run())
        mx.eval(results)

    found = trace(evaluated)
    total = Counted(
        kernel=kernel,
        matrix=sum(each.count("matrix") for each in found),
        bytes=sum(map(device_bytes, found)),
        lane_bytes=sum(
            memory.lane_read_bytes for each in found for memory in each.memories()
        ),
        threads=threads,
    )
    return total, results[0]


def device_bytes(counters: Counters) -> int:
    """Returns the bytes of device memory that a launch moves."""
    return sum(
        memory.read_bytes
        - memory.repeated_read_bytes
        + memory.written_bytes
        - memory.repeated_written_bytes
        for memory in counters.memories()
        if memory.space == "device"
    )


def ours(problem: Problem, plan: MetalPlan, *, exact: bool = False) -> Counted:
    """Counts our plan of a product.

    Args:
        problem: The product; its dtype is that of x and of scales.
        plan: A plan of it.
        exact: Whether all columns are run.
    """
    parts = [(1, plan)] if exact else [*shares(plan)]
    counts = [_of_plan(part).times(factor) for factor, part in parts]
    return sum(counts[1:], start=counts[0])


def shares(plan: MetalPlan) -> Iterator[tuple[int, MetalPlan]]:
    """Yields plans of few columns, and the factors with which they add up to a plan.

    A plan of equal tiles is so many plans of one tile. One of `wide` wide tiles and
    `narrow` ones follows from the plans of one and of two wide tiles and a narrow one.
    Plans that split tiles are run whole.
    """
    problem, work = plan.problem, plan.work
    if not plan.is_whole or plan.m_tiles > 1 or problem.n % TILE_N:
        yield 1, plan
    elif plan.simdgroups_n == 1:
        small = replace(problem, n=TILE_N)
        one = replace(plan, problem=small, work=data_parallel(1, work.k_tiles))
        yield work.tiles, one
    else:
        wide = work.whole
        narrow = work.tiles - wide
        yield 2 * narrow - wide, _hytis(plan, 1)
        yield wide - narrow, _hytis(plan, 2)


def _hytis(plan: MetalPlan, wide: int) -> MetalPlan:
    columns = TILE_N * (wide * plan.simdgroups_n + 1)
    work = Work(
        strategy="hytis",
        tiles=wide + 1,
        k_tiles=plan.work.k_tiles,
        threadgroups=wide + 1,
        whole=wide,
    )
    return replace(plan, problem=replace(plan.problem, n=columns), work=work)


def _of_plan(plan: MetalPlan) -> Counted:
    problem = plan.problem
    x = mx.random.normal((problem.m, problem.k)).astype(getattr(mx, problem.dtype))
    _, native = drawn_arrays.arrays(replace(problem, m=1), seed=0)
    weight = drawn_arrays.stored(problem, native)
    call = graph.product(plan)
    threads = sum(prod(launch.grid) for launch in launches(plan))
    return _counted(plan.kernel, threads, lambda: call(x, *weight))[0]


def mlx(problem: Problem, device: Device, *, exact: bool = False) -> Counted:
    """Counts the kernel that MLX launches; the sum of its parts of k is left out."""
    call = stock_call(problem, device)
    n = problem.n if exact else COLUMNS
    product = Product(
        kernel=call.kernel,
        mode="affine",
        dtype=getattr(mx, problem.dtype),
        m=problem.m,
        n=n,
        k=problem.k,
        bits=problem.bits,
        splits=call.split_k,
    )
    operands = Operands.of(product)
    dispatch = mlx_geometry.dispatch(product, operands)
    header = mlx_headers.affine()
    threads = prod(dispatch.groups) * prod(dispatch.threads)
    found, _ = _counted(call.kernel, threads, lambda: dispatch.run(header))
    return found.times(problem.n // n)


def rival(problem: Problem, *, exact: bool = False) -> Counted:
    """Counts mlx-dspark's `skinny_qmm`, at float16 by our translation."""
    n, dtype = problem.n if exact else COLUMNS, getattr(mx, problem.dtype)
    template, grid, threads = dspark.plan(
        problem.m, problem.n, problem.k, problem.bits, dtype
    )
    small = [(name, n if name == "N" else value) for name, value in template]
    grid = (grid[0] * n // problem.n, *grid[1:])
    weight = mx.quantize(
        mx.random.normal((n, problem.k)).astype(dtype),
        group_size=problem.group_size,
        bits=problem.bits,
    )
    x = mx.random.normal((problem.m, problem.k)).astype(dtype)
    planned: Any = small, grid, threads
    found, _ = _counted(
        "skinny_qmm",
        prod(grid),
        lambda: dspark.skinny_qmm(x, weight, problem.bits, planned),
    )
    return found.times(problem.n // n)


def plan_of(problem: Problem, device: Device, **fields: Any) -> MetalPlan:
    """Returns the plan that the chip's planner chooses, or one with given fields."""
    plan = planner.make(problem, device=device, **fields)
    assert isinstance(plan, MetalPlan)
    return plan
