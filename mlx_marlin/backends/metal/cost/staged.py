"""What `gemm_staged` should cost where it differs from `gemm_register`.

A model throughout: none of its figures was counted by a compiler, let alone measured. A
simdgroup that loads decodes a chunk of w for all others; one that multiplies loads what
was staged; all wait at barriers, and for the slowest of them.
"""

from dataclasses import dataclass

from mlx_marlin.backends.metal.cost.loop import LoopCost
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.backends.metal.staging import barriers
from mlx_marlin.planning.work.tiles import FRAGMENT, step_k
from mlx_marlin.weights.formats import SCALE_BYTES, TILE_K, TILE_N

GROUP_SLOTS = 48
"""Slots in which a reader sums and scales a trip of a row fragment (by the text)."""
BARRIER_SLOTS = 30
"""Slots that a simdgroup loses at a barrier (assumed: nobody has told)."""
THREADGROUP_BYTES_PER_CLOCK = 128
"""Bytes of threadgroup memory that a core moves in a clock: 32 banks of 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What a trip of the main loop costs all simdgroups together, 32 rows of w x 64 k.

    Attributes:
        other: Slots beside the matrix products, barriers included.
        lane_bytes: Bytes that loads from device memory return to lanes for a weight.
        staged_bytes: Bytes for a weight to threadgroup memory and back.
    """

    other: float
    lane_bytes: float
    staged_bytes: float


def staged_loop(plan: MetalPlan, trip: LoopCost, readers: dict[int, int]) -> Loop:
    """Returns the cost of the main loop of a plan of `gemm_staged`.

    Args:
        plan: The plan.
        trip: The counts of the format for `gemm_register`.
        readers: Simdgroups that read each weight, by the row fragments they hold.
    """
    problem = plan.problem
    count = sum(readers.values())
    fragments = sum(each * number for each, number in readers.items())
    along_k = TILE_K // FRAGMENT
    rows = TILE_N // FRAGMENT * along_k  # fragments of w in a trip
    tiles = plan.m_tiles
    decoded = tiles * (trip.fragments[0][plan.subtract] + rows) + fragments * along_k
    read = count * rows + fragments * (along_k + GROUP_SLOTS)
    waits = barriers(1, plan.buffers) - barriers(0, plan.buffers)
    stages = TILE_K / step_k(problem.group_size) / plan.simdgroups_k
    waiting = tiles * plan.simdgroups * stages * waits * BARRIER_SLOTS
    size = SCALE_BYTES[problem.scale_dtype] * problem.format.parameters
    element = problem.fragment_bytes
    # A row fragment of x has a quarter of the rows that a chunk of w has.
    of_x = fragments * FRAGMENT / TILE_N
    return Loop(
        other=decoded + read + waiting,
        lane_bytes=tiles * problem.bits / 8
        + count * 4 * size / step_k(problem.group_size)
        + of_x * problem.activation_bytes / (problem.m * problem.k),
        staged_bytes=element * (tiles + count + 2 * of_x),
    )
