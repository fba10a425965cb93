"""Cost model of the Metal kernels: predicted times, never measurements.

A plan takes the longest of three times (memory traffic, issue slots, bytes that loads
return to lanes), multiplied by a factor for load imbalance and low occupancy. In a
chain, where each product waits for the one before it, each dispatch also takes
`level_seconds`. Among independent launches that time is hidden.

A *slot* is one instruction of one simdgroup on one of a core's four schedulers. Slots
and `registers` were counted with an open compiler for the first Apple generation, and
the rates fitted to published times of stock MLX and of kernels like ours (`rates`).
Nothing was measured on the kernels of this package.
"""

from mlx_marlin.backends.metal.cost.main_loop import (
    loop_of,
)
from mlx_marlin.backends.metal.cost.rates import (
    lane_bytes_per_second,
    level_seconds,
    memory_seconds,
    slots_per_second,
)
from mlx_marlin.backends.metal.cost.residency import resident_threadgroups
from mlx_marlin.backends.metal.cost.tensor import tensor_loop
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.planning.search import Prediction
from mlx_marlin.planning.work.tiles import SIMD_WIDTH

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
        from mlx_marlin.backends.metal.experiments.staged_cost import (
            staged_slots_and_bytes,
        )

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
    resident = max(min(resident_threadgroups(plan, device)), 1)
    return min(1.0, resident * plan.simdgroups / SIMDGROUPS_TO_FILL)
