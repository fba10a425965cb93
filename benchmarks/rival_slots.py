"""Issue slots, registers and spills of the kernels that `rival_calls` counts.

Slots are those of the main loop, for 2,048 weights (64 k of 32 rows of w) and all rows
of x: a kernel that reads a weight several times pays each time.
"""

import re
from dataclasses import dataclass
from functools import cache
from math import ceil

import mlx.core as mx

from benchmarks import agx, mlx_texts
from benchmarks.agx import TYPES, Counts, Text
from benchmarks.rival_calls import RIVAL_ROWS, dspark
from benchmarks.stock.kernels import stock_call
from mlx_marlin.backends.launch import Launch
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.launches import launches
from mlx_marlin.backends.metal.main_loop import (
    MATRIX_OPS,
    WEIGHTS_PER_TRIP,
    readers,
)
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.problem import Problem

UNROLLED = re.compile(r"for \(int ([tred]) ")
"""Heads of the rival's loops whose bounds are constants."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """What the AGX aid says of a kernel.

    Attributes:
        slots: Issue slots for 2,048 weights and all rows of x.
        registers: 16-bit registers of a thread.
        spills: Stores of registers to memory.
    """

    slots: int
    registers: int
    spills: int


def ours(plan: MetalPlan) -> Slots:
    """Returns the counts of our plan's first kernel."""
    found = _of_launch(launches(plan)[0])
    if plan.fragments_m == 0:
        return _of(found, max(found.slots))
    total = sum(
        count * found.slots_with(MATRIX_OPS[fragments])
        for fragments, count in readers(plan.problem.m, plan.fragments_m).items()
    )
    return _of(found, total)


def rival(problem: Problem) -> Slots:
    """Returns the counts of mlx-dspark's `skinny_qmm`."""
    found = _skinny(problem)
    return _of(found, ceil(problem.m / RIVAL_ROWS) * max(found.slots))


def mlx(problem: Problem, device: Device) -> Slots:
    """Returns the counts of the kernel that MLX launches."""
    call = stock_call(problem, device)
    found = _of_mlx(call.kernel, call.rows, problem.bits, TYPES[problem.dtype])
    if call.family.startswith("qmm"):
        # Four simdgroups share 1,024 weights. Rows that end inside a tile have the
        # second of its loops, which checks bounds and takes longer.
        choose = max if problem.m % call.rows else min
        slots = zip(found.slots, found.matrix, strict=True)
        loop = choose(each for each, products in slots if products)
        return _of(found, call.passes * 8 * loop)
    weights = 1024 if (call.family, problem.bits) == ("qmv_fast", 8) else 2048
    return _of(found, call.passes * max(found.slots) * WEIGHTS_PER_TRIP // weights)


@cache
def _of_mlx(kernel: str, rows: int, bits: int, metal: str) -> Counts:
    # Without LLVM the loops of these kernels stay rolled, or do not compile.
    return agx.counts(mlx_texts.text(kernel, rows, bits, metal), levels=("-O2",))


def _of_launch(launch: Launch) -> Counts:
    key = launch.instance, launch.threadgroup
    if key not in _known:
        _known[key] = agx.count(launch)
    return _known[key]


_known: dict[object, Counts] = {}


def _skinny(problem: Problem) -> Counts:
    rows = min(problem.m, RIVAL_ROWS)
    return _skinny_of(
        rows > RIVAL_ROWS // 2, problem.n, problem.k, problem.bits, problem.dtype
    )


@cache
def _skinny_of(two: bool, n: int, k: int, bits: int, dtype: str) -> Counts:
    """Counts the kernel with its loops unrolled, its number of rows passed by value."""
    type_ = getattr(mx, dtype)
    header, body = dspark.text(type_)
    template, _, threads = dspark.plan(16 if two else 8, n, k, bits, type_)
    values = {name: TYPES[dtype] if name == "T" else value for name, value in template}
    body = UNROLLED.sub(r'_Pragma("unroll") for (int \1 ', body)
    metal = TYPES[dtype]
    given = ("X", metal), ("Wq", "uint32_t"), ("SC", metal), ("BI", metal)

    def text(source: str, *more: tuple[str, str]) -> Text:
        return Text(
            inputs=[*given, *more],
            outputs=[("OUT", metal)],
            source=source,
            header=header,
            template=values,
            threadgroup=threads,
        )

    preloaded = body.replace("X_shape[0]", "X_rows")
    return agx.counts(text(body), text(preloaded, ("X_rows", "int&")))


def _of(counts: Counts, slots: int) -> Slots:
    return Slots(slots=slots, registers=counts.registers, spills=counts.spills)
