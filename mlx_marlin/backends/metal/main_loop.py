"""Cost of the main loop of `gemv` and `gemm_register`, however the work is divided.

The counts are those of an open compiler for the first Apple generation, by format. They
rank variants; Apple's compiler may give others. An iteration is 64 k of 32 rows of w.
The data file is written by `python -m benchmarks.counts`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.rates import rates_of
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT
from mlx_marlin.weights.formats import DTYPE_BYTES, TILE_K, TILE_N, format_of

LARGEST_GROUP = 64
"""Group size whose counts larger groups have."""


Counts = Sequence[Sequence[int]]
"""The fields of a `Count` for each number of rows or fragments, from 1 on."""


class Count(NamedTuple):
    """What an iteration takes."""

    slots: int  # Issue slots besides the matrix products
    registers: int  # 16-bit registers of a thread that are alive at once, at most
    allocated: int  # Those that the compiler took, which fills its classes


@dataclass(frozen=True, slots=True)
class LoopCost:
    """Counts of one format."""

    # Counts for 1 and 2 row fragments of x, by form of codes and dtype
    fragments: Mapping[str, Counts]
    # Counts of the dot products for 1 row and more, in the same way
    rows: Mapping[str, Counts]

    def of_fragments(self, fragments_m: int, operand: CodeForm, dtype: str) -> Count:
        """Returns the counts of the matrix products.

        A form that was not counted costs as much as the exact one, and a third fragment
        as much as the second.
        """
        return _nth(_of_form(self.fragments, operand, dtype), fragments_m)

    def of_rows(self, m: int, operand: CodeForm, dtype: str) -> Count:
        """Returns the counts of the dot products; further rows cost as the last
        does."""
        return _nth(_of_form(self.rows, operand, dtype), m)


def _nth(counts: Counts, nth: int) -> Count:
    """Returns a count, from 1 on; further ones grow as the last one does."""
    if nth <= len(counts):
        return Count(*counts[nth - 1])
    before, last = counts[-2:]
    more = nth - len(counts)
    return Count(*(b + more * (b - a) for a, b in zip(before, last, strict=True)))


def form_key(operand: CodeForm, dtype: str) -> str:
    """Returns the name of a form of codes and a dtype in the data file."""
    return f"{operand} {dtype}"


def format_key(codes: str, bits: int, group: int, layout: str) -> str:
    """Returns the name of a format in the data file."""
    return f"{codes} {bits} {group} {layout}"


@lru_cache
def loop_cost(mode: str, bits: int, group_size: int, layout: str) -> LoopCost:
    """Returns the counts of a format, or of the affine one if it was not counted."""
    group = min(group_size, LARGEST_GROUP)
    table = _counted()
    codes = format_of(mode, bits).codes
    found = table.get(format_key(codes, bits, group, layout))
    found = found or table[format_key("affine", bits, group, layout)]
    return LoopCost(found["fragments"], found["rows"])


def _of_form(counts: Mapping[str, Counts], operand: CodeForm, dtype: str) -> Counts:
    # Except for 4 bits, the cheapest offset is the least one.
    second: CodeForm = "offset" if operand == "least_offset" else "exact"
    found = counts.get(form_key(operand, dtype)) or counts.get(form_key(second, dtype))
    for other in ("exact", "offset"):
        found = found or counts.get(form_key(other, dtype))
    return found or counts[form_key("exact", "float32")]


@lru_cache(maxsize=1)
def _counted() -> dict[str, Any]:
    import json
    from pathlib import Path

    file = Path(__file__).parents[2] / "data" / "counts.json"
    table: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return table


WEIGHTS_PER_TRIP = TILE_N * TILE_K
"""Weights that a simdgroup decodes in one iteration of the main loop."""
MATRIX_OPS = {1: 32, 2: 64, 3: 96}
"""8x8 products of an iteration, by fragments_m (counted)."""
NORM_SLOTS = 33
"""Additional slots of an iteration for each normalized row (counted)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MainLoop:
    """Cost of the main loop."""

    # Memory traffic: every operand once. A weight in MLX's layout counts as the packed
    # one that takes as long to read
    bytes: float
    slots: float  # Issue slots of all simdgroups
    lane_bytes: float  # Bytes that loads return to lanes
    matrix: float = 0.0  # Seconds of the tensor units; 0 if they are not used


@lru_cache(maxsize=1024)
def loop_of(
    problem: Problem, fragments_m: int, operand: CodeForm, device: Device
) -> MainLoop:
    """Returns the cost of the main loop; cached for all plans of a product."""
    counts = loop_cost(problem.mode, problem.bits, problem.group_size, problem.layout)
    weights, rates = padded_weights(problem), rates_of(device)
    slots, x_bytes = _per_iteration(
        counts, fragments_m, operand, problem.m, problem.dtype, rates.matrix_slots
    )
    traffic: float = problem.bytes
    if problem.layout == "mlx":
        traffic += problem.weight_bytes * (1 / rates.scattered - 1)
    if problem.norm is not None:
        slots += NORM_SLOTS * problem.m
        x_bytes += DTYPE_BYTES[problem.dtype] / 4  # its weight, as a row of x
    slots *= weights / WEIGHTS_PER_TRIP
    lane_bytes = weights * (x_bytes + _weight_lane_bytes(problem, fragments_m))
    return MainLoop(bytes=traffic, slots=slots, lane_bytes=lane_bytes)


def loop_slots(
    problem: Problem, fragments_m: int, operand: CodeForm, m: int, device: Device
) -> float:
    """Returns the issue slots of the main loop per weight, for m rows."""
    counts = loop_cost(problem.mode, problem.bits, problem.group_size, problem.layout)
    price = rates_of(device).matrix_slots
    slots, _ = _per_iteration(counts, fragments_m, operand, m, problem.dtype, price)
    return slots / WEIGHTS_PER_TRIP


def padded_weights(problem: Problem) -> int:
    """Returns the number of weights that are decoded once, rows padded to tiles."""
    return problem.batch * -(-problem.n // TILE_N) * TILE_N * problem.k


def readers(m: int, fragments_m: int) -> dict[int, int]:
    """Returns the simdgroups that read each weight, by the row fragments they hold.

    The kernel skips whole fragments past the last row.
    """
    whole, rest = divmod(-(-m // FRAGMENT), fragments_m)
    return {fragments_m: whole, rest: 1} if rest else {fragments_m: whole}


def _per_iteration(
    counts: LoopCost,
    fragments_m: int,
    operand: CodeForm,
    m: int,
    dtype: str,
    matrix_slots: float,
) -> tuple[float, float]:
    """Returns the slots of an iteration for all rows, and the lane bytes of x a weight.

    Every group of four fragments of w loads x once: half an element per weight for each
    row of a dot product, and as much for each fragment of 8 rows.
    """
    element = DTYPE_BYTES[dtype] / 4
    if fragments_m == 0:
        return counts.of_rows(m, operand, dtype).slots, m * element
    slots = x_bytes = 0.0
    for fragments, count in readers(m, fragments_m).items():
        other = counts.of_fragments(fragments, operand, dtype).slots
        slots += count * (matrix_slots * MATRIX_OPS[fragments] + other)
        x_bytes += count * fragments * element
    return slots, x_bytes


def _weight_lane_bytes(problem: Problem, fragments_m: int) -> float:
    """Returns the bytes of w that the lanes of all simdgroups receive per weight.

    Every lane loads the group parameters of its four rows in each step.
    """
    size = problem.format.scale_bytes(problem.group_size, problem.scale_dtype)
    repeated = 4 * size / (32 if problem.group_size == 32 else TILE_K)
    count = sum(readers(problem.m, fragments_m).values()) if fragments_m else 1
    return (problem.bits / 8 + repeated) * count
