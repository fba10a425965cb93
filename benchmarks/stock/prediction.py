"""Cost model of stock MLX: predicted times of a product, never measurements.

The kernel that MLX chooses (`kernels`) is priced like the plans of this package: the
longest of memory traffic, issue slots and bytes that loads return to lanes, multiplied
by a factor for load imbalance and low occupancy. In a chain, where each product waits
for the one before it, each dispatch takes `level_seconds` more, and a matrix kernel
ends in a whole wave of threadgroups. Slots were counted with an open compiler for the
first Apple generation (`slots`). docs/stock_model.md has the errors on the published
times that the rates (`cost.rates`) are fitted to.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from benchmarks.stock.kernels import (
    StockCall,
    codes_at_a_time,
    is_floating,
    stock_call,
    stock_split,
)
from benchmarks.stock.slots import (
    SLOWER_BYTES,
    TILE_SIMDGROUPS,
    TILE_WEIGHTS,
    stock_slots,
    vector_slots,
)
from mlx_marlin.backends.metal.device import ALU_FLOPS, Device
from mlx_marlin.backends.metal.main_loop import (
    SCHEDULERS_PER_CORE,
    lane_bytes_per_second,
    level_seconds,
    memory_seconds,
    mlx_matrix_slots,
)
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import clocks_text
from mlx_marlin.weights.formats import DTYPE_BYTES, SCALE_BYTES

__all__ = [
    "StockCall",
    "StockPrediction",
    "stock_call",
    "stock_prediction",
    "stock_split",
]

THIN = 1.5
"""Stretch from which low occupancy is the bottleneck of a product."""
EMULATED_BFLOAT = 352 / 256
"""Factor on the slots of `qmv_fast` if bfloat16 is emulated (counted)."""
NATIVE_BFLOAT = 15
"""First generation (M3) with native bfloat16."""
FEWEST_WIDE = 2
"""Fewest rows of `qmv_wide`."""
KNOWN_BITS = {"M3": (2, 4, 8), "M4": (2, 4, 8)}
"""Bits of the affine codes whose published times were fitted, of all kernels."""
TILE_PRODUCTS = TILE_SIMDGROUPS * 16 / TILE_WEIGHTS
"""8x8 products of `qmm_t` per weight, for 32 rows and four simdgroups."""

MOST_WAVES = 1.3
"""Largest factor for the last wave; published chains show up to 1.29."""

# 0.83, and 14 threadgroups on the most loaded of 40 cores, give the published 0.508 ms
# of 544 tiles. Without rounding up to 14 the factor would be 0.855.
OVERLAP = {"M3": 0.83, "M4": 0.83, "M5": 0.83}
"""Factor on the slots of `qmm_t` for their overlap (fit: M3 Max, M4 Pro; assumed: M5);
1 for other generations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockPrediction:
    """Predicted times of the product alone in stock MLX, in seconds."""

    call: StockCall  # The launch
    memory: float  # Memory traffic of the operands and the partial sums
    issue: float  # Instruction issue, if all cores are equally loaded
    loads: float  # Loaded bytes returned to lanes, if all cores are equally loaded
    stretch: float  # Factor of at least 1 for load imbalance and low occupancy
    # Factor of at least 1 in a chain, where no other launch fills the last wave of
    # threadgroups
    waves: float
    dispatch: float  # Dispatches in a chain, besides their work
    calibrated: bool  # Whether published times of such chips and formats were fitted

    @property
    def seconds(self) -> float:
        """Time of the whole product in a chain."""
        return self.independent_seconds * self.waves + self.dispatch

    @property
    def independent_seconds(self) -> float:
        """Time of the whole product among launches that overlap."""
        return max(self.memory, self.issue, self.loads) * self.stretch

    @property
    def bound(self) -> str:
        """The bottleneck: "memory", "issue", "lane bytes" or "thin filling"."""
        if self.stretch >= THIN:
            return "thin filling"
        times = {
            "memory": self.memory,
            "issue": self.issue,
            "lane bytes": self.loads,
        }
        return max(times, key=times.__getitem__)

    def explain(self) -> str:
        """Returns the prediction as one line that says that nothing was measured."""
        call = self.call
        model = "model, not measured" + ", uncalibrated" * (not self.calibrated)
        split = f" in {call.split_k} splits of k" if call.split_k > 1 else ""
        return (
            f"stock MLX: {call.kernel}, {call.threadgroups} threadgroups{split}, "
            f"w read {call.passes}x; predicted "
            f"{clocks_text(self.seconds, self.independent_seconds)} ({model}), "
            f"bound by {self.bound}"
        )


@lru_cache(maxsize=4096)
def stock_prediction(problem: Problem, device: Device) -> StockPrediction:
    """Returns the predicted times of a product in stock MLX; cached.

    The epilogue is not included, because it consists of separate operations in stock
    MLX. A packed weight is priced as a native one.
    """
    call = stock_call(problem, device)
    columns = call.geometry.columns
    decoded: float = problem.k * columns * ceil(problem.n / columns) * call.passes
    decoded *= problem.batch
    known = problem.bits in KNOWN_BITS.get(device.generation, ())
    if known and problem.bits == 8 and not is_floating(problem):
        decoded *= SLOWER_BYTES
    slots = decoded * _slots(call, problem, device)
    lane_bytes = decoded * _lane_bytes(call, problem)
    return StockPrediction(
        call=call,
        memory=memory_seconds(_traffic(call, problem), device),
        issue=slots / (SCHEDULERS_PER_CORE * device.clocks),
        loads=lane_bytes / lane_bytes_per_second(device),
        stretch=_stretch(call, device),
        waves=_waves(call, device),
        dispatch=call.dispatches * level_seconds(device),
        calibrated=_is_calibrated(call, problem, device),
    )


def _is_calibrated(call: StockCall, problem: Problem, device: Device) -> bool:
    """Returns whether published times were fitted; those of Ultra chips disagree.

    Of M5 these are times of the vector kernels and 4 bits.
    """
    newest = device.generation == "M5" and not call.family.startswith("qmm")
    bits = (4,) if newest else KNOWN_BITS.get(device.generation, ())
    known = problem.mode == "affine" and problem.bits in bits
    plain = DTYPE_BYTES[problem.dtype] == 2 and problem.batch == 1
    return known and plain and device.tier != "ultra"


def _slots(call: StockCall, problem: Problem, device: Device) -> float:
    """Returns the issue slots per decoded weight."""
    slots = stock_slots(problem)
    if call.family == "qmv_wide":
        return slots.wide[call.rows - FEWEST_WIDE]
    if call.family == "qmm_t_nax":
        # With one buffer, decoding and the tensor units alternate.
        return slots.tile + tensor_slots(call.rows, device)
    if call.family.startswith("qmm"):
        products = TILE_PRODUCTS * mlx_matrix_slots(device)
        return (products + slots.tile) * OVERLAP.get(device.generation, 1.0)
    emulated = problem.dtype == "bfloat16" and device.arch_gen < NATIVE_BFLOAT
    return vector_slots(problem, device) * (EMULATED_BFLOAT if emulated else 1)


def tensor_slots(rows: int, device: Device) -> float:
    """Returns the issue slots in which tensor units multiply a weight by some rows."""
    # MLX can be told to use tensor units that a chip lacks (MLX_METAL_GPU_ARCH).
    rate = device.core.tensor_flops_per_clock or ALU_FLOPS
    return 2 * rows * SCHEDULERS_PER_CORE / rate


def _lane_bytes(call: StockCall, problem: Problem) -> float:
    """Returns the bytes that lanes receive per decoded weight.

    Scale and bias are loaded once for the weights that a lane decodes at a time: a
    whole group in `qmv_wide`, 8 to 32 in the other vector kernels, 8 in the matrix
    kernels. x is loaded for one row of w in `qmv_wide`, and for four (or two) in the
    other vector kernels.
    """
    x_bytes = DTYPE_BYTES[problem.dtype]
    code_bytes = problem.bits / 8
    scale_bytes: float = problem.format.parameters * SCALE_BYTES[problem.scale_dtype]
    if call.family == "qmv_wide":
        return call.rows * x_bytes + code_bytes + scale_bytes / problem.group_size
    if call.family.startswith("qmm"):
        return x_bytes + code_bytes + scale_bytes / 8
    shared = 2 if call.kernel.endswith("_2") else 4  # rows of w per load of x
    scale_bytes /= codes_at_a_time(problem.bits)
    return x_bytes / shared + code_bytes + scale_bytes


def _traffic(call: StockCall, problem: Problem) -> int:
    """Returns the memory traffic: operands once, partial sums written and read."""
    partials = 4 * call.split_k * problem.m * problem.n if call.split_k > 1 else 0
    native = problem.code_bytes + problem.scale_bytes
    return native + problem.activation_bytes + problem.output_bytes + 2 * partials


def _stretch(call: StockCall, device: Device) -> float:
    """Returns the load of the most loaded core over the mean, times low occupancy."""
    per_core = ceil(call.threadgroups / device.cores)
    imbalance = per_core * device.cores / call.threadgroups
    simdgroups = per_core * call.geometry.simdgroups
    return imbalance * max(1.0, call.geometry.to_fill / simdgroups)


def _waves(call: StockCall, device: Device) -> float:
    """Returns the threadgroups of whole waves over those of the most loaded core.

    Barriers separate loads from products in the matrix kernels, so a core with less
    than a wave of them takes as long as with a whole one. A wave is `to_fill`
    simdgroups. The vector kernels have no barriers.
    """
    if not call.family.startswith("qmm"):
        return 1.0
    wave = call.geometry.to_fill // call.geometry.simdgroups
    per_core = ceil(call.threadgroups / device.cores)
    return min(ceil(per_core / wave) * wave / max(per_core, wave), MOST_WAVES)
