"""Cost of the main loop of `gemm_staged`.

All figures are estimates: none was counted with a compiler or measured. Simdgroups that
load decode a chunk of w for all others, simdgroups that multiply load it from
threadgroup memory, and all of them wait at barriers.
"""

from dataclasses import dataclass

from mlx_marlin.backends.metal.cost.counts import LoopCost, loop_cost
from mlx_marlin.backends.metal.cost.main_loop import (
    MATRIX_OPS,
    WEIGHTS_PER_TRIP,
    padded_weights,
    readers,
)
from mlx_marlin.backends.metal.cost.rates import rates_of
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experiments.staging import barriers
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.work.tiles import FRAGMENT, step_k
from mlx_marlin.weights.formats import TILE_K, TILE_N

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
    counts = loop_cost(problem.mode, problem.bits, problem.group_size, problem.layout)
    held = readers(problem.m, plan.fragments_m)
    loop = _staged_loop(plan, counts, held)
    products = sum(count * MATRIX_OPS[held_m] for held_m, count in held.items())
    slots = rates.matrix_slots * products + loop.other
    staged = loop.staged_bytes * rates.lane_bytes / THREADGROUP_BYTES_PER_CLOCK
    weights = padded_weights(problem)
    return slots * weights / WEIGHTS_PER_TRIP, (loop.lane_bytes + staged) * weights


def _staged_loop(plan: MetalPlan, counts: LoopCost, held: dict[int, int]) -> StagedLoop:
    """Returns the cost of the main loop of a plan of `gemm_staged`."""
    problem = plan.problem
    count = sum(held.values())
    fragments = sum(held_m * number for held_m, number in held.items())
    along_k = TILE_K // FRAGMENT
    rows = TILE_N // FRAGMENT * along_k  # fragments of w in an iteration
    tiles = plan.m_tiles
    one = counts.of_fragments(1, plan.operand, problem.dtype).slots
    decoded = tiles * (one + rows) + fragments * along_k
    read = count * rows + fragments * (along_k + GROUP_SLOTS)
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
        + count * 4 * size / step_k(problem.group_size)
        + of_x * problem.activation_bytes / (problem.m * problem.k),
        staged_bytes=element * (tiles + count + 2 * of_x),
    )
