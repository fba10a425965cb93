"""Cost model of the Metal kernels: predicted times, never measurements.

A plan takes the longest of three times (memory traffic, issue slots, bytes that loads
return to lanes), multiplied by a factor for load imbalance and low occupancy. In a
chain, where each product waits for the one before it, each dispatch also takes
`level_seconds`. Among independent launches that time is hidden.

A *slot* is one instruction of one simdgroup on one of a core's four schedulers. Slots
and `registers` were counted with an open compiler for the first Apple generation, and
the rates fitted to published times of stock MLX and of kernels like ours (`rates`).
Nothing was measured on the kernels of this package. All figures of `gemm_staged` are
estimates, which none of these ways gave.

*Feeding* is what comes between the words of a weight and a tensor operation: loads,
decoding, scales, and waiting for one another. Published kernels of this design reach
neither the bandwidth nor the rate of the tensor units, though their instructions take a
third of the time, so feeding is a rate that is fitted to their times (docs/m5.md).
"""

from dataclasses import dataclass
from functools import lru_cache

from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.kernel_limits import (
    OPERATION_FRAGMENTS,
    resident_threadgroups,
)
from mlx_marlin.backends.metal.main_loop import (
    MATRIX_OPS,
    SCHEDULERS_PER_CORE,
    WEIGHTS_PER_TRIP,
    MainLoop,
    count,
    lane_bytes_per_second,
    level_seconds,
    loop_of,
    memory_seconds,
    mlx_matrix_slots,
    padded_weights,
    rates_of,
    readers,
    slots_per_second,
)
from mlx_marlin.backends.metal.plan import MetalPlan, barriers
from mlx_marlin.planning.dequantize_plan import (
    LEAST_ROWS,
    DequantizePlan,
    dequantize_plan,
)
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import Prediction
from mlx_marlin.planning.work.tiles import FRAGMENT, SIMD_WIDTH, step_k
from mlx_marlin.weights.formats import DTYPE_BYTES, TILE_K, TILE_N

SIMDGROUPS_TO_FILL = 8
"""Simdgroups that a core needs to hide DRAM latency: 5 to 8 with 1 KB in flight each
(Little's law, 400 ns)."""
RANGE_SLOTS = 140
"""Slots in which a simdgroup computes its range of the work (counted)."""
SPLIT_SLOTS = {0: (53, 28), 1: (84, 0), 2: (148, 0), 3: (212, 0), 4: (276, 0)}
"""Slots of a split without its stores: fixed and per row, by fragments_m; 0 is the dot
product (counted, except 3 and 4: more fragments cost what the second does)."""
WHOLE_SLOTS = {0: (41, 28), 1: (70, 0), 2: (90, 0), 3: (110, 0), 4: (130, 0)}
"""Slots of range and split together if threadgroups have one whole tile (counted,
except 3 and 4, as above)."""
INSIDE_SLOTS = 124
"""Slots in which a simdgroup computes the slot index of a split inside a tile
(counted)."""
STORE_SLOTS = (5, 2)
"""Slots per stored row of a tile: fixed, and per simdgroup along k (counted)."""
REDUCE_SLOTS = 2.3
"""Slots of the reduce kernel per element (counted)."""


def predict(plan: MetalPlan, device: Device) -> Prediction:
    """Returns the predicted times of a plan on a device."""
    if plan.has_tensor_operations:
        loop = tensor_loop(plan.problem, plan.fragments_m, device)
    else:
        loop = loop_of(plan.problem, plan.fragments_m, plan.operand, device)
    slots, lane_bytes = loop.slots, loop.lane_bytes
    if plan.buffers:
        slots, lane_bytes = staged_slots_and_bytes(plan, device)
    return Prediction(
        memory=memory_seconds(loop.bytes + plan.workspace_traffic, device),
        issue=(slots + _other_slots(plan)) / slots_per_second(device),
        loads=lane_bytes / lane_bytes_per_second(device),
        busy=busy(plan, device),
        fill=_fill(plan, device),
        dispatch=level_seconds(device) * (plan.dispatches - 1),
        matrix=loop.matrix,
        launch=level_seconds(device),
    )


def busy(plan: MetalPlan, device: Device) -> float:
    """Returns the load of the mean core over that of the most loaded core, 0 to 1.

    This is the work over (cores x resident threadgroups x waves x longest range), where
    cores get the whole tiles and then the ranges round robin. It assumes the worst
    case, in which the longest ranges are on one core: Metal does not specify the order,
    and any regular order can coincide with the period of the ranges.
    """
    work, cores = plan.work, device.cores
    whole = plan.simdgroups_n * work.k_tiles
    total = work.threadgroups - work.idle
    distinct = {0}
    if work.whole:  # some cores have one more whole tile, one more range, or both
        distinct |= {work.whole % cores, (total - 1) % cores, min(total, cores) - 1}
    longest, fullest = work.longest_of_tail, 0
    for core in distinct:
        first = -(-(work.whole - core) // cores)
        after = -(-(total - core) // cores) - first
        fullest = max(fullest, first * whole + after * longest)
    return (work.whole * whole + work.tail * work.k_tiles) / (cores * fullest)


def _other_slots(plan: MetalPlan) -> float:
    """Returns the slots outside the main loop, including those of the reduce."""
    work = plan.work
    simdgroups = plan.threads // SIMD_WIDTH
    fixed, per_row = (WHOLE_SLOTS if plan.is_whole else SPLIT_SLOTS)[plan.fragments_m]
    rows = plan.tile.m if plan.fragments_m == 0 else 0
    slots = work.pieces * (fixed + per_row * rows)
    if not plan.is_whole:
        inside = work.pieces - work.tiles
        slots += work.threadgroups * RANGE_SLOTS + inside * INSIDE_SLOTS
    store, per_simdgroup = STORE_SLOTS
    stored = work.pieces * plan.tile.m * (store + per_simdgroup * plan.simdgroups_k)
    elements = plan.problem.batch * plan.problem.m * plan.problem.n
    reduced = plan.needs_second_pass * elements * REDUCE_SLOTS
    return simdgroups * slots + stored + reduced


def _fill(plan: MetalPlan, device: Device) -> float:
    """Returns the degree to which a busy core hides latency, 0 to 1."""
    resident = max(min(resident_threadgroups(plan, plan.registers, device)), 1)
    return min(1.0, resident * plan.simdgroups / SIMDGROUPS_TO_FILL)


OPERATION_ROWS = FRAGMENT * OPERATION_FRAGMENTS
"""Rows of x of a tensor operation."""
FEEDING = 3.4
"""Time of an iteration over that of its counted issue slots. Fitted to four published
times of similar kernels on an M5 Max (docs/m5.md), not measured with this kernel."""


@lru_cache(maxsize=1024)
def tensor_loop(problem: Problem, fragments_m: int, device: Device) -> MainLoop:
    """Returns the cost of the main loop of `gemm_tensor`.

    Slots are those of `gemm_register` with 16 rows, which decodes the same words, adds
    up the same activations and scales as many sums. The second operation of a
    simdgroup decodes nothing: two more fragments cost twice what the second one of
    `gemm_register` does.
    """
    weights = padded_weights(problem)
    one, two = (count(problem, held, "offset", "float16").slots for held in (1, 2))
    operations = -(-problem.m // OPERATION_ROWS)
    decoders = -(-operations // (fragments_m // OPERATION_FRAGMENTS))
    counted = two * decoders + 2 * (two - one) * (operations - decoders)
    slots = FEEDING * counted * weights / WEIGHTS_PER_TRIP
    size = problem.format.scale_bytes(problem.group_size, problem.scale_dtype)
    parameters = 4 * size / step_k(problem.group_size)
    of_x = OPERATION_ROWS / TILE_N * DTYPE_BYTES[problem.dtype]
    of_w = problem.bits / 8 + parameters
    lane_bytes = weights * (decoders * of_w + operations * of_x)
    rows = OPERATION_ROWS * operations
    matrix = 2 * rows * weights / (device.clocks * device.matrix_flops)
    return MainLoop(
        bytes=problem.bytes,
        slots=slots,
        lane_bytes=lane_bytes,
        matrix=matrix,
    )


GROUP_SLOTS = 48
"""Slots in which a reader sums and scales a row fragment per iteration (estimated from
the source)."""
BARRIER_SLOTS = 30
"""Slots that a simdgroup loses at a barrier (assumed; no published figure)."""
THREADGROUP_BYTES_PER_CLOCK = 128
"""Bytes of threadgroup memory that a core moves per clock: 32 banks of 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedLoop:
    """Cost of an iteration of the main loop (32 rows of w x 64 k), all simdgroups."""

    other: float  # Slots besides the matrix products, including barriers
    lane_bytes: float  # Bytes per weight that loads from device memory return to lanes
    staged_bytes: float  # Bytes per weight written to and read from threadgroup memory


def staged_slots_and_bytes(plan: MetalPlan, device: Device) -> tuple[float, float]:
    """Returns the issue slots and the lane bytes of a main loop of `gemm_staged`.

    Traffic of threadgroup memory is converted to lane bytes that take as long.
    """
    problem, rates = plan.problem, rates_of(device)
    held = readers(problem.m, plan.fragments_m)
    loop = _staged_loop(plan, held)
    products = sum(number * MATRIX_OPS[held_m] for held_m, number in held.items())
    slots = rates.matrix_slots * products + loop.other
    staged = loop.staged_bytes * rates.lane_bytes / THREADGROUP_BYTES_PER_CLOCK
    weights = padded_weights(problem)
    return slots * weights / WEIGHTS_PER_TRIP, (loop.lane_bytes + staged) * weights


def _staged_loop(plan: MetalPlan, held: dict[int, int]) -> StagedLoop:
    """Returns the cost of the main loop of a plan of `gemm_staged`."""
    problem = plan.problem
    simdgroups = sum(held.values())
    fragments = sum(held_m * number for held_m, number in held.items())
    along_k = TILE_K // FRAGMENT
    rows = TILE_N // FRAGMENT * along_k  # fragments of w in an iteration
    tiles = plan.m_tiles
    one = count(problem, 1, plan.operand).slots
    decoded = tiles * (one + rows) + fragments * along_k
    read = simdgroups * rows + fragments * (along_k + GROUP_SLOTS)
    waits = barriers(1, plan.buffers) - barriers(0, plan.buffers)
    stages = TILE_K / step_k(problem.group_size) / plan.simdgroups_k
    waiting = tiles * plan.simdgroups * stages * waits * BARRIER_SLOTS
    size = problem.format.scale_bytes(problem.group_size, problem.scale_dtype)
    element = problem.fragment_bytes
    # A row fragment of x has a quarter of the rows of a chunk of w.
    of_x = fragments * FRAGMENT / TILE_N
    return StagedLoop(
        other=decoded + read + waiting,
        lane_bytes=tiles * problem.bits / 8
        + simdgroups * 4 * size / step_k(problem.group_size)
        + of_x * problem.activation_bytes / (problem.m * problem.k),
        staged_bytes=element * (tiles + simdgroups + 2 * of_x),
    )


EFFICIENCY = 0.9
"""Share of the matrix rate that `mx.matmul` reaches. With it the model gives the 9 %
over the quantized product that were reported for an M4 Max."""


def dequantize_seconds(problem: Problem, device: Device) -> float:
    """Returns the predicted seconds of decoding the weight and multiplying it.

    These are two dispatches, the second of which waits for the first.
    """
    weight = problem.n * problem.k * DTYPE_BYTES[problem.dtype]
    operands = problem.activation_bytes + problem.output_bytes
    decode = memory_seconds(problem.weight_bytes + weight, device)
    multiply = max(
        memory_seconds(weight + operands, device), _arithmetic(problem, device)
    )
    return decode + multiply + 2 * level_seconds(device)


def _arithmetic(problem: Problem, device: Device) -> float:
    if device.has_tensor_units and problem.dtype != "float32":
        return problem.flops / (device.clocks * device.matrix_flops)
    products = problem.flops / (2 * FRAGMENT**3)
    slots = products * mlx_matrix_slots(device)
    return slots / (SCHEDULERS_PER_CORE * device.clocks * EFFICIENCY)


def dequantize_if_faster(
    problem: Problem, device: Device, others: float
) -> DequantizePlan | None:
    """Returns such a plan if it is predicted to take less than `others`, else None.

    `others`: predicted seconds of the best alternative.
    """
    plain = problem.epilogue == PLAIN and problem.batch == 1
    if problem.m < LEAST_ROWS or not plain or problem.invariant:
        return None
    if dequantize_seconds(problem, device) >= others:
        return None
    return dequantize_plan(problem)
