"""Throughput of Apple GPUs, and the cost of a main loop, however work is divided.

Bandwidth and the rate of loads are those of a chip, for all kernels. The price of 8x8
products and the share of `scattered` loads are those of our kernels. `python -m
benchmarks.stock_fit` fits them again and prints the error of each published time;
docs/stock_model.md has the errors.

The counts are those of an open compiler for the first Apple generation, by format. They
rank variants; Apple's compiler may give others. An iteration is 64 k of 32 rows of w.
The data file is written by `python -m benchmarks.counts`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT, step_k
from mlx_marlin.weights.formats import DTYPE_BYTES, TILE_K, TILE_N, format_of

SCHEDULERS_PER_CORE = 4
"""Simdgroup instructions that a core can issue per clock (metal-benchmarks)."""
ULTRA_LANES = 0.94
"""Share of `Rates.lane_bytes` that an Ultra reaches (fit: M3 Ultra, chains)."""
LEVELS = {"unknown": 9e-6, "M1": 9e-6, "M2": 5e-6}
"""Seconds of a dispatch that waits for the one before it, by generation: launch,
barrier, and the time in which the first loads arrive. From published decoding rates, as
time of a token over its dependent dispatches: M1 Max 10 us, M1 Ultra 7 to 10. M2 Pro is
stated as 5.2 (ferrox#149). Unknown chips have the slowest."""
LEVEL = 3e-6
"""The same from M3 on: M4 Pro 2.1 us, M4 Max 2.7 to 4.3; M5 Max is stated as 3 to 4
(rltakashige/mlx-lm)."""
ULTRA_LEVEL = 5.5e-6
"""The same on Ultra chips from M2 on: M3 Ultra 5.3 to 5.6 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Fitted rates of one chip generation."""

    # Issue slots of one 8x8 product in our kernels. No other slots are hidden behind
    # the products
    matrix_slots: float
    bandwidth: float  # Share of the stated memory bandwidth that kernels reach
    # Share of `bandwidth` at which our kernels read codes in MLX's layout: 8 rows of w
    # at a time instead of a whole packed tile
    scattered: float
    lane_bytes: float  # Bytes that the loads of a core return to lanes per clock


APPLE9 = Rates(matrix_slots=19, bandwidth=0.9, scattered=0.9, lane_bytes=85)
"""M3 and M4. Bandwidth and loads are fitted to published times of stock MLX on M3 Max
and M4 Pro, the others to those of a kernel of `gemm_register`'s design on M4 Pro
(mlx-dspark 0.20.3), which reads 212 to 217 GB/s in fragments and 241 to 244 in whole
lines, and multiplies 7.0 to 7.5 of 8.08 TFLOPS: 17 to 19 slots a product."""
M5 = replace(APPLE9, matrix_slots=16, bandwidth=0.8, lane_bytes=106)
"""M5 and M5 Pro: 8x8 products fitted to times of such a kernel on M5 Pro
(krcm0209/sous), loads as on M5 Max, and the bandwidth of the published times of one
row."""
M5_MAX = replace(M5, bandwidth=0.9)
"""M5 Max, fitted to published times of stock MLX with 1 to 12 rows."""
EARLIER = Rates(matrix_slots=20, bandwidth=0.8, scattered=1.0, lane_bytes=85)
"""M1, M2 and unknown chips: no published time to fit, hence the slowest known rates.
The bandwidth is that of scattered reads already."""
RATES = {"M3": APPLE9, "M4": APPLE9, "M5": M5}

MLX_MATRIX_SLOTS = {"M3": 16, "M4": 16, "M5": 16}
"""Issue slots of one 8x8 product of MLX's own kernels (fit: M3 Max, M4 Pro; assumed:
M5). Ours pay `Rates.matrix_slots`."""
SLOWEST_MATRIX_SLOTS = 20
"""The same for other generations, for which nothing was published."""


def mlx_matrix_slots(device: Device) -> int:
    """Returns the issue slots of one 8x8 product of MLX's own kernels."""
    return MLX_MATRIX_SLOTS.get(device.generation, SLOWEST_MATRIX_SLOTS)


def rates_of(device: Device) -> Rates:
    """Returns the fitted rates of a device."""
    if (device.generation, device.tier) == ("M5", "max"):
        return M5_MAX
    return RATES.get(device.generation, EARLIER)


def level_seconds(device: Device) -> float:
    """Returns the seconds that a dependent dispatch takes besides its work."""
    if device.tier == "ultra" and device.generation != "M1":
        return ULTRA_LEVEL
    return LEVELS.get(device.generation, LEVEL)


def memory_seconds(size: float, device: Device) -> float:
    """Returns the seconds to move `size` bytes at the fitted bandwidth."""
    return size / (rates_of(device).bandwidth * device.bandwidth_gbs * 1e9)


def slots_per_second(device: Device) -> float:
    """Returns the issue slots per second of all cores."""
    return SCHEDULERS_PER_CORE * device.clocks


def lane_bytes_per_second(device: Device) -> float:
    """Returns the bytes per second that the loads of all cores return to lanes."""
    share = ULTRA_LANES if device.tier == "ultra" else 1.0
    return share * rates_of(device).lane_bytes * device.clocks


LARGEST_GROUP = 64
"""Group size whose counts larger groups have."""


Counts = Sequence[Sequence[int]]
"""The fields of a `Count` for each number of rows or fragments, from 1 on."""


class Count(NamedTuple):
    """What an iteration takes."""

    slots: int  # Issue slots besides the matrix products
    registers: int  # 16-bit registers of a thread that are alive at once, at most
    allocated: int  # Those that the compiler took, which fills its classes


def format_key(codes: str, bits: int, group: int, layout: str) -> str:
    """Returns the name of a format in the data file."""
    return f"{codes} {bits} {group} {layout}"


def count(
    problem: Problem,
    fragments_m: int,
    operand: CodeForm,
    dtype: str = "",
    rows: int = 1,
) -> Count:
    """Returns the counts of matrix products; of dot products if `fragments_m` is 0.

    A form that was not counted costs as much as the exact one. Further fragments and
    rows cost as the last one does.

    `dtype`: dtype of the activations if it is not the problem's.
    `rows`: rows of dot products.
    """
    found = _of_format(problem.mode, problem.bits, problem.group_size, problem.layout)[
        "fragments" if fragments_m else "rows"
    ]
    dtype = dtype or problem.dtype
    # Except for 4 bits, the cheapest offset is the least one.
    second = "offset" if operand == "least_offset" else "exact"
    forms = [f"{form} {dtype}" for form in (operand, second, "exact", "offset")]
    counts = found[next(filter(found.__contains__, forms), "exact float32")]
    nth = fragments_m or rows
    if nth <= len(counts):
        return Count(*counts[nth - 1])
    before, last = counts[-2:]
    more = nth - len(counts)
    return Count(*(b + more * (b - a) for a, b in zip(before, last, strict=True)))


@lru_cache
def _of_format(
    mode: str, bits: int, group_size: int, layout: str
) -> dict[str, dict[str, Counts]]:
    """Returns the counts of a format, or of the affine one if it was not counted."""
    group = min(group_size, LARGEST_GROUP)
    table = _counted()
    codes = format_of(mode, bits).codes
    found = table.get(format_key(codes, bits, group, layout))
    return found or table[format_key("affine", bits, group, layout)]


@lru_cache(maxsize=1)
def _counted() -> dict[str, dict[str, dict[str, Counts]]]:
    import json
    from pathlib import Path

    file = Path(__file__).parents[2] / "data" / "counts.json"
    table: dict[str, dict[str, dict[str, Counts]]] = json.loads(file.read_text("utf-8"))
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
    m, weights = problem.m, padded_weights(problem)
    slots, x_bytes = _per_iteration(problem, fragments_m, operand, m, device)
    traffic: float = problem.bytes
    if problem.layout == "mlx":
        traffic += problem.weight_bytes * (1 / rates_of(device).scattered - 1)
    if problem.norm is not None:
        slots += NORM_SLOTS * m
        x_bytes += DTYPE_BYTES[problem.dtype] / 4  # its weight, as a row of x
    slots *= weights / WEIGHTS_PER_TRIP
    # All simdgroups read w. Every lane loads the group parameters of its four rows in
    # each step.
    size = problem.format.scale_bytes(problem.group_size, problem.scale_dtype)
    w_bytes = problem.bits / 8 + 4 * size / step_k(problem.group_size)
    w_bytes *= sum(readers(m, fragments_m).values()) if fragments_m else 1
    return MainLoop(
        bytes=traffic, slots=slots, lane_bytes=weights * (x_bytes + w_bytes)
    )


def loop_slots(
    problem: Problem, fragments_m: int, operand: CodeForm, m: int, device: Device
) -> float:
    """Returns the issue slots of the main loop per weight, for m rows."""
    slots, _ = _per_iteration(problem, fragments_m, operand, m, device)
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
    problem: Problem, fragments_m: int, operand: CodeForm, m: int, device: Device
) -> tuple[float, float]:
    """Returns the slots of an iteration for m rows, and the lane bytes of x a weight.

    Every group of four fragments of w loads x once: half an element per weight for each
    row of a dot product, and as much for each fragment of 8 rows.
    """
    element = DTYPE_BYTES[problem.dtype] / 4
    if fragments_m == 0:
        return count(problem, 0, operand, rows=m).slots, m * element
    slots = x_bytes = 0.0
    for held, simdgroups in readers(m, fragments_m).items():
        products = rates_of(device).matrix_slots * MATRIX_OPS[held]
        slots += simdgroups * (products + count(problem, held, operand).slots)
        x_bytes += simdgroups * held * element
    return slots, x_bytes
