"""What a plan should cost: a model, never a measurement.

A plan takes the longest of three times (memory traffic, issue slots, bytes that loads
return to lanes), stretched by how unevenly the cores are loaded and by how few
simdgroups they have to hide latency with, plus the price of a second dispatch.

A *slot* is one instruction of one simdgroup on one of a core's four schedulers. The
slots were counted with an open compiler for the first Apple generation, and the rates
fitted to published times of stock MLX on M3 Max and M4 Pro, which they meet within 6 %.
Nothing here was measured on our own kernels.
"""

from dataclasses import dataclass
from functools import lru_cache

from mlx_marlin.backends.metal.cost.loop import LoopCost, trip_of
from mlx_marlin.backends.metal.cost.staged import (
    THREADGROUP_BYTES_PER_CLOCK,
    staged_loop,
)
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.prediction import Prediction
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import FRAGMENT, SIMD_WIDTH
from mlx_marlin.weights.formats import (
    DTYPE_BYTES,
    SCALE_BYTES,
    TILE_K,
    TILE_N,
)

SCHEDULERS_PER_CORE = 4
"""Simdgroup instructions that a core can issue in a clock (metal-benchmarks)."""
LANE_BYTES_PER_CLOCK = 85
"""Bytes that a core's loads return to lanes in a clock (fit: M3 Max, M4 Pro)."""
SIMDGROUPS_TO_FILL = 8
"""Simdgroups that a core needs to cover DRAM latency: 5 to 8 with 1 KB in flight each
(Little's law, 400 ns)."""
FURTHER_DISPATCH = 1.6e-6
"""Seconds for the barrier and launch of each dispatch after the first (reported: 1.3
to 2 us)."""

WEIGHTS_PER_TRIP = TILE_N * TILE_K
"""Weights that a simdgroup decodes in one trip of the main loop."""
MATRIX_OPS = {1: 32, 2: 64}
"""8x8 products of a trip, by fragments_m (counted)."""
RANGE_REGISTERS = 14
"""16-bit registers more where a threadgroup has a range instead of one whole tile
(counted: 12 to 16)."""
FLOAT_REGISTERS = {0: 16, 1: 20, 2: 48}
"""Likewise where x is not half, by fragments_m; 0 is each row of the dot product
(counted)."""
RANGE_SLOTS = 140
"""Slots in which a simdgroup finds its range of the work (counted)."""
SPLIT_SLOTS = {0: (53, 28), 1: (84, 0), 2: (148, 0)}
"""Slots of a split without its stores: at all and for each row, by fragments_m; 0 is
the dot product (counted)."""
WHOLE_SLOTS = {0: (41, 28), 1: (70, 0), 2: (90, 0)}
"""Likewise of range and split where every threadgroup has one whole tile (counted)."""
INSIDE_SLOTS = 124
"""Slots in which a simdgroup finds the slot of a split inside a tile (counted)."""
STORE_SLOTS = (5, 2)
"""Slots of a stored row of a tile: at all, and for each simdgroup along k (counted)."""
REDUCE_SLOTS = 2.3
"""Slots of the reduce for an element (counted)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast one chip generation is, as fitted.

    Attributes:
        matrix_slots: Slots that one 8x8 product occupies.
        exposed: Share of the other slots that does not hide behind the products.
        bandwidth: Share of the stated bandwidth that kernels reach.
    """

    matrix_slots: float
    exposed: float
    bandwidth: float


APPLE9 = Rates(matrix_slots=16, exposed=0.6, bandwidth=0.9)
"""M3 and M4, fitted to published M3 Max and M4 Pro times."""
NEWEST = Rates(matrix_slots=16, exposed=0.6, bandwidth=0.8)
"""M5: as before, but the published times of one row say no more of its bandwidth."""
EARLIER = Rates(matrix_slots=20, exposed=1.0, bandwidth=0.8)
"""M1, M2 and unknown chips: no published time to fit, so the slow side of the known."""
RATES = {"M3": APPLE9, "M4": APPLE9, "M5": NEWEST}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What the main loop costs, however the work is cut.

    Attributes:
        bytes: To move between memory and the cores: every operand once.
        slots: Issue slots of all simdgroups.
        lane_bytes: Bytes that loads return to lanes.
        registers: 16-bit registers of a thread.
        seconds: To run it on all cores alike, and nothing else.
    """

    bytes: int
    slots: float
    lane_bytes: float
    registers: int
    seconds: float


def predict(plan: MetalPlan, device: Device) -> Prediction:
    """Returns what the model says about a plan on a device."""
    loop = loop_of(plan.problem, plan.fragments_m, plan.subtract, device)
    slots, lane_bytes = loop.slots, loop.lane_bytes
    if plan.buffers:
        slots, lane_bytes = _staged(plan, device)
    return Prediction(
        memory=memory_seconds(loop.bytes + workspace_traffic(plan), device),
        issue=(slots + _other_slots(plan)) / _slots_per_second(device),
        loads=lane_bytes / _lane_bytes_per_second(device),
        busy=busy(plan, device),
        fill=_fill(plan, device, loop.registers),
        dispatch=FURTHER_DISPATCH * (plan.dispatches - 1),
    )


def least_seconds(plan: MetalPlan, device: Device, is_split: bool) -> float:
    """Returns what no cut of a plan's work takes less than.

    Args:
        plan: What a threadgroup looks like; its work does not matter.
        device: The chip to plan for.
        is_split: Whether partial sums have to meet.
    """
    loop = loop_of(plan.problem, plan.fragments_m, plan.subtract, device)
    return loop.seconds + FURTHER_DISPATCH * is_split


def rates_of(device: Device) -> Rates:
    """Returns the fitted rates of a device's generation."""
    return RATES.get(device.generation, EARLIER)


def memory_seconds(size: int, device: Device) -> float:
    """Returns the seconds that moving `size` bytes takes at the fitted bandwidth."""
    return size / (rates_of(device).bandwidth * device.bandwidth_gbs * 1e9)


def _slots_per_second(device: Device) -> float:
    return SCHEDULERS_PER_CORE * (device.cores * device.clock_ghz * 1e9)


def _lane_bytes_per_second(device: Device) -> float:
    return LANE_BYTES_PER_CLOCK * (device.cores * device.clock_ghz * 1e9)


def workspace_traffic(plan: MetalPlan) -> int:
    """Returns the bytes of partial sums that are written, and read again."""
    if plan.reduction == "none":
        return 0
    problem, work = plan.problem, plan.work
    passes = work.pieces / work.tiles + (plan.reduction == "atomic")
    return round(2 * passes * problem.batch * problem.m * problem.n * 4)


def busy(plan: MetalPlan, device: Device) -> float:
    """Returns the mean core's share of the work over the fullest one's, 0 to 1.

    The work over (cores x resident threadgroups x waves x longest range), for whole
    tiles and the ranges after them as each core gets them in turn. At worst the longest
    ranges meet on one core: Metal does not say how it deals them out, and any regular
    way can meet the period of the ranges.
    """
    work, cores = plan.work, device.cores
    whole = plan.simdgroups_n * work.k_tiles
    total = work.threadgroups - work.idle
    kinds = {0}
    if work.whole:  # a core then has one whole tile more, one range more, both, neither
        kinds |= {work.whole % cores, (total - 1) % cores, min(total, cores) - 1}
    longest, fullest = work.longest_of_tail, 0
    for core in kinds:
        first = -(-(work.whole - core) // cores)
        after = -(-(total - core) // cores) - first
        fullest = max(fullest, first * whole + after * longest)
    return (work.whole * whole + work.tail * work.k_tiles) / (cores * fullest)


def _resident(plan: MetalPlan, device: Device, registers: int) -> int:
    """Returns the threadgroups that fit on a core at a time, at least 1."""
    core = device.core
    registers += RANGE_REGISTERS * (not plan.is_whole)
    threads = min(core.register_bytes // (2 * registers), core.max_threads)
    by_memory = core.threadgroup_bytes // plan.threadgroup_bytes
    return max(min(threads // plan.threads, by_memory), 1)


@lru_cache(maxsize=1024)
def loop_of(problem: Problem, fragments_m: int, subtract: bool, device: Device) -> Loop:
    """Returns what the main loop costs; cached for all plans of a product.

    Args:
        problem: The product.
        fragments_m: Row fragments of x that a simdgroup holds; 0 for dot products.
        subtract: Whether the codes lose their offset first.
        device: The chip to plan for.
    """
    trip = trip_of(problem.mode, problem.bits, problem.group_size, problem.layout)
    weights = problem.batch * -(-problem.n // TILE_N) * TILE_N * problem.k
    slots, x_bytes = _per_trip(
        trip, fragments_m, subtract, problem.m, problem.dtype, rates_of(device)
    )
    slots *= weights / WEIGHTS_PER_TRIP
    lane_bytes = weights * (x_bytes + _weight_lane_bytes(problem, fragments_m))
    rows = 1 if fragments_m else problem.m
    base, each = trip.row_registers
    registers = trip.registers[fragments_m - 1] if fragments_m else base + each * rows
    # Groups of 16 integers were counted in float.
    in_float = problem.group_size == 16 and problem.format.codes != "floating"
    if problem.dtype != "float16" and not (in_float and fragments_m):
        registers += FLOAT_REGISTERS[fragments_m] * rows
    return Loop(
        bytes=problem.bytes,
        slots=slots,
        lane_bytes=lane_bytes,
        registers=registers,
        seconds=max(
            memory_seconds(problem.bytes, device),
            slots / _slots_per_second(device),
            lane_bytes / _lane_bytes_per_second(device),
        ),
    )


def _per_trip(
    trip: LoopCost, fragments_m: int, subtract: bool, m: int, dtype: str, rates: Rates
) -> tuple[float, float]:
    """Returns what all rows cost: slots of a trip, bytes of x to lanes for a weight.

    Every group of four W fragments loads x once: half an element a weight for each
    row of a dot product, and as much for each fragment of 8 rows.
    """
    element = DTYPE_BYTES[dtype] / 4
    if fragments_m == 0:
        base, each = trip.rows
        slots: float = base + each * m + subtract * trip.row_subtract
        return slots, m * element
    slots = x_bytes = 0.0
    for fragments, count in _readers(m, fragments_m).items():
        other = trip.fragments[fragments - 1][subtract]
        products = rates.matrix_slots * MATRIX_OPS[fragments]
        slots += count * (products + rates.exposed * other)
        x_bytes += count * fragments * element
    return slots, x_bytes


def _staged(plan: MetalPlan, device: Device) -> tuple[float, float]:
    """Returns the slots and lane bytes of `gemm_staged`, with those of its memory."""
    problem, rates = plan.problem, rates_of(device)
    trip = trip_of(problem.mode, problem.bits, problem.group_size, problem.layout)
    readers = _readers(problem.m, plan.fragments_m)
    loop = staged_loop(plan, trip, readers)
    products = sum(count * MATRIX_OPS[each] for each, count in readers.items())
    slots = rates.matrix_slots * products + rates.exposed * loop.other
    staged = loop.staged_bytes * LANE_BYTES_PER_CLOCK / THREADGROUP_BYTES_PER_CLOCK
    weights = problem.batch * -(-problem.n // TILE_N) * TILE_N * problem.k
    return slots * weights / WEIGHTS_PER_TRIP, (loop.lane_bytes + staged) * weights


def _weight_lane_bytes(problem: Problem, fragments_m: int) -> float:
    """Returns the bytes of weight that lanes receive for a weight, by all simdgroups.

    Each lane has the factors of its four rows in every step of the main loop.
    """
    size = SCALE_BYTES[problem.scale_dtype] * problem.format.parameters
    repeated = 4 * size / (32 if problem.group_size == 32 else TILE_K)
    readers = 1
    if fragments_m:
        readers = sum(_readers(problem.m, fragments_m).values())
    return (problem.bits / 8 + repeated) * readers


def loop_slots(
    problem: Problem, fragments_m: int, subtract: bool, m: int, device: Device
) -> float:
    """Returns the slots of a main loop for a weight and m rows, as `loop_of` has it."""
    trip = trip_of(problem.mode, problem.bits, problem.group_size, problem.layout)
    rates = rates_of(device)
    slots, _ = _per_trip(trip, fragments_m, subtract, m, "float16", rates)
    return slots / WEIGHTS_PER_TRIP


def _readers(m: int, fragments_m: int) -> dict[int, int]:
    """Returns how many simdgroups read each weight, by the row fragments they hold.

    Whole fragments past the last row are left out by the kernel.
    """
    whole, rest = divmod(-(-m // FRAGMENT), fragments_m)
    return {fragments_m: whole, rest: 1} if rest else {fragments_m: whole}


def _other_slots(plan: MetalPlan) -> float:
    """Returns the slots outside the main loop, the reduce's included."""
    work = plan.work
    simdgroups = plan.threads // SIMD_WIDTH
    once, row = (WHOLE_SLOTS if plan.is_whole else SPLIT_SLOTS)[plan.fragments_m]
    rows = plan.tile.m if plan.fragments_m == 0 else 0
    slots = work.pieces * (once + row * rows)
    if not plan.is_whole:
        inside = work.pieces - work.tiles
        slots += work.threadgroups * RANGE_SLOTS + inside * INSIDE_SLOTS
    store, along_k = STORE_SLOTS
    stored = work.pieces * plan.tile.m * (store + along_k * plan.simdgroups_k)
    elements = plan.problem.batch * plan.problem.m * plan.problem.n
    reduced = plan.needs_second_pass * elements * REDUCE_SLOTS
    return simdgroups * slots + stored + reduced


def _fill(plan: MetalPlan, device: Device, registers: int) -> float:
    """Returns how well a busy core hides latency, from 0 to 1."""
    threadgroups = plan.work.threadgroups - plan.work.idle
    turns = -(-threadgroups // device.cores)
    turns = min(turns, _resident(plan, device, registers))
    return min(1.0, turns * plan.threads / SIMD_WIDTH / SIMDGROUPS_TO_FILL)
