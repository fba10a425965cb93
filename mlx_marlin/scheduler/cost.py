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

from mlx_marlin.device import Device
from mlx_marlin.formats import DTYPE_BYTES, TILE_K, TILE_N
from mlx_marlin.plan import FRAGMENT, Plan

SCHEDULERS_PER_CORE = 4
"""Simdgroup instructions that a core can issue in a clock (metal-benchmarks)."""
LANE_BYTES_PER_CLOCK = 85
"""Bytes that a core's loads return to lanes in a clock (fit: M3 Max, M4 Pro)."""
SIMDGROUPS_TO_FILL = 8
"""Simdgroups that a core needs to cover DRAM latency: 5 to 8 with 1 KB in flight each
(Little's law, 400 ns)."""
SECOND_DISPATCH = 1.6e-6
"""Seconds for the barrier and launch of the reduce (reported: 1.3 to 2 us)."""

WEIGHTS_PER_TRIP = TILE_N * TILE_K
"""Weights that a simdgroup decodes in one trip of the main loop."""
MATRIX_OPS = {1: 33, 2: 66}
"""8x8 products of a trip, by fragments_m (counted)."""
OTHER_SLOTS = {1: 147, 2: 201}
"""Slots of a trip beside the matrix products, by fragments_m (counted)."""
SUBTRACT_SLOTS = {0: 46, 1: 48, 2: 54}
"""More of them when the offset is subtracted first; 0 is the dot product (counted)."""
GEMV_SLOTS = {1: 184, 2: 281, 3: 373, 4: 467, 5: 563}
"""Slots of a trip of the dot-product kernel, by rows (counted)."""
WEIGHT_LANE_BYTES = 0.75
"""Bytes that lanes receive for a weight: its code, and its scales with repetition."""


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
"""M3 and later, fitted to published M3 Max and M4 Pro times."""
EARLIER = Rates(matrix_slots=20, exposed=1.0, bandwidth=0.8)
"""M1, M2 and unknown chips: no published time to fit, so the slow side of the known."""
RATES = {"M3": APPLE9, "M4": APPLE9, "M5": APPLE9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The model's times for one plan on one device, in seconds.

    Attributes:
        memory: To move the operands and the workspace.
        issue: To issue the instructions, all cores alike.
        loads: To return the loaded bytes to the lanes, all cores alike.
        stretch: Factor of at least 1 for unevenly loaded and thinly filled cores.
        reduce: For the second dispatch, 0 without one.
    """

    memory: float
    issue: float
    loads: float
    stretch: float
    reduce: float

    @property
    def seconds(self) -> float:
        """The whole product."""
        return max(self.memory, self.issue, self.loads) * self.stretch + self.reduce

    @property
    def bound(self) -> str:
        """What takes longest: "memory", "issue" or "loads"."""
        times = {"memory": self.memory, "issue": self.issue, "loads": self.loads}
        return max(times, key=times.__getitem__)

    def explain(self) -> str:
        """Says the prediction in a line, as a prediction."""
        text = (
            f"predicted {self.seconds * 1e6:.1f} us (model, not measured): bound by "
            f"{self.bound}, x{self.stretch:.2f} for uneven or thinly filled cores"
        )
        if self.reduce:
            text += f", {self.reduce * 1e6:.1f} us of it for the second dispatch"
        return text


def predict(plan: Plan, device: Device) -> Prediction:
    """Returns what the model says about a plan on a device."""
    rates = rates_of(device)
    clocks = device.cores * device.clock_ghz * 1e9
    weights = plan.n_tiles * TILE_N * plan.problem.k
    readers = _readers(plan)
    trips = weights / WEIGHTS_PER_TRIP
    slots = trips * sum(
        count * _trip_slots(plan, fragments, rates)
        for fragments, count in readers.items()
    )
    lane_bytes = weights * sum(
        count * _lane_bytes(plan, fragments) for fragments, count in readers.items()
    )
    return Prediction(
        memory=memory_seconds(plan.problem.bytes + 2 * plan.workspace_bytes, device),
        issue=(slots + _epilogue_slots(plan)) / (SCHEDULERS_PER_CORE * clocks),
        loads=lane_bytes / (LANE_BYTES_PER_CLOCK * clocks),
        stretch=_imbalance(plan, device) / _fill(plan, device),
        reduce=SECOND_DISPATCH if plan.is_split else 0.0,
    )


def rates_of(device: Device) -> Rates:
    """Returns the fitted rates of a device's generation."""
    return RATES.get(device.generation, EARLIER)


def memory_seconds(size: int, device: Device) -> float:
    """Returns the seconds that moving `size` bytes takes at the fitted bandwidth."""
    return size / (rates_of(device).bandwidth * device.bandwidth_gbs * 1e9)


def _readers(plan: Plan) -> dict[int, int]:
    """Returns how many simdgroups read each weight, by the row fragments they hold.

    Whole fragments past the last row are left out by the kernel.
    """
    if plan.kernel == "gemv":
        return {0: 1}
    fragments = -(-plan.problem.m // FRAGMENT)
    whole, rest = divmod(fragments, plan.fragments_m)
    return {plan.fragments_m: whole, rest: 1} if rest else {plan.fragments_m: whole}


def _trip_slots(plan: Plan, fragments: int, rates: Rates) -> float:
    """Returns the slots of one trip of one simdgroup."""
    if plan.kernel == "gemv":
        return GEMV_SLOTS[plan.problem.m] + plan.subtract * SUBTRACT_SLOTS[0]
    other = OTHER_SLOTS[fragments] + plan.subtract * SUBTRACT_SLOTS[fragments]
    return rates.matrix_slots * MATRIX_OPS[fragments] + rates.exposed * other


def _epilogue_slots(plan: Plan) -> int:
    """Returns the slots of all units' ends: each partial row is stored and loaded."""
    return plan.units * 2 * plan.simdgroups_k * plan.tile.m


def _lane_bytes(plan: Plan, fragments: int) -> float:
    """Returns the bytes that lanes receive for a weight and simdgroup.

    Every group of four W fragments loads x once: half an element a weight for each
    row of a dot product, and as much for each fragment of 8 rows.
    """
    rows = plan.problem.m if plan.kernel == "gemv" else fragments
    return WEIGHT_LANE_BYTES + rows * DTYPE_BYTES[plan.problem.dtype] / 4


def _imbalance(plan: Plan, device: Device) -> float:
    """Returns the fullest core's share of the units over the mean share.

    At worst the threadgroups with most units meet on one core: Metal does not say how
    it deals them out, and any regular way can meet the period of the runs.
    """
    _, most = plan.units_per_threadgroup
    return _turns(plan, device) * most * device.cores / plan.units


def _fill(plan: Plan, device: Device) -> float:
    """Returns how well a busy core hides latency, from 0 to 1."""
    simdgroups = _turns(plan, device) * plan.simdgroups_m * plan.simdgroups_k
    return min(1.0, simdgroups / SIMDGROUPS_TO_FILL)


def _turns(plan: Plan, device: Device) -> int:
    """Returns the threadgroups of the core that gets most of them."""
    return -(-(plan.num_threadgroups - plan.idle) // device.cores)
