"""What a product should cost in stock MLX: a model, never a measurement.

The kernel that MLX chooses (`stock_dispatch`) is priced like our own plans: memory
traffic, issue slots and bytes that loads return to lanes, of which the longest counts,
stretched by unevenly and thinly filled cores. Slots were counted with an open compiler
for the first Apple generation (`stock_slots`), the rates fitted to published times of
stock MLX's 4-bit affine products; nobody published times of other formats:
docs/stock_model.md has each of them. The chooser asks `stock_prediction`, nothing else.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from mlx_marlin.backends.metal.cost import (
    FURTHER_DISPATCH,
    LANE_BYTES_PER_CLOCK,
    SCHEDULERS_PER_CORE,
    memory_seconds,
    rates_of,
)
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.stock.kernels import (
    StockCall,
    codes_at_a_time,
    stock_call,
    stock_split,
)
from mlx_marlin.backends.metal.stock.slots import (
    TILE_SIMDGROUPS,
    TILE_WEIGHTS,
    stock_slots,
)
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights.formats import DTYPE_BYTES, SCALE_BYTES

__all__ = [
    "StockCall",
    "StockPrediction",
    "stock_call",
    "stock_prediction",
    "stock_split",
]

THIN = 1.5
"""From this stretch on, the filling of the cores is what bounds a product."""
ALU_FLOPS = 256
"""Operations of a core in a clock without tensor units, which MLX can be told to use
all the same (MLX_METAL_GPU_ARCH)."""

EMULATED_BFLOAT = 352 / 256
"""Factor on the slots of `qmv_fast` where bfloat16 is emulated (counted)."""
NATIVE_BFLOAT = 15
"""The generation (M3) from which it is not."""
FEWEST_WIDE = 2
"""Fewest rows of `qmv_wide`."""
TILE_PRODUCTS = TILE_SIMDGROUPS * 16 / TILE_WEIGHTS
"""8x8 products of `qmm_t` for a weight and 32 rows, over its four simdgroups."""

# 0.83 and 14 turns of the fullest of 40 cores are the published 0.508 ms of 544 tiles;
# without counting turns it would be 0.855.
OVERLAP = {"M3": 0.83, "M4": 0.83, "M5": 0.83}
"""Factor on the slots of `qmm_t`, where they hide behind each other (fit: M3 Max, M4
Pro; assumed: M5). 1 elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockPrediction:
    """The model's times for stock MLX's product alone, in seconds.

    Attributes:
        call: What is launched.
        memory: To move the operands and the partial sums.
        issue: To issue the instructions, all cores alike.
        loads: To return the loaded bytes to the lanes, all cores alike.
        stretch: Factor of at least 1 for unevenly loaded and thinly filled cores.
        reduce: For the second dispatch, 0 without one.
        calibrated: Whether published times of such chips and formats were fitted.
    """

    call: StockCall
    memory: float
    issue: float
    loads: float
    stretch: float
    reduce: float
    calibrated: bool

    @property
    def seconds(self) -> float:
        """The whole product."""
        return max(self.memory, self.issue, self.loads) * self.stretch + self.reduce

    @property
    def bound(self) -> str:
        """What takes longest: "memory", "issue", "lane bytes", or "thin filling"."""
        if self.stretch >= THIN:
            return "thin filling"
        times = {
            "memory": self.memory,
            "issue": self.issue,
            "lane bytes": self.loads,
        }
        return max(times, key=times.__getitem__)

    def explain(self) -> str:
        """Says the prediction in a line, as a prediction."""
        call = self.call
        model = "model, not measured" + ", uncalibrated" * (not self.calibrated)
        split = f" in {call.split_k} splits of k" if call.split_k > 1 else ""
        return (
            f"stock MLX: {call.kernel}, {call.threadgroups} threadgroups{split}, "
            f"w read {call.passes}x; predicted {self.seconds * 1e6:.1f} us ({model}), "
            f"bound by {self.bound}"
        )


@lru_cache(maxsize=4096)
def stock_prediction(problem: Problem, device: Device) -> StockPrediction:
    """Returns what the model says stock MLX takes for a product; cached.

    The product alone: a bias, an activation or a residual are operations of their own
    in stock MLX. A packed weight is priced as if it were native.

    Args:
        problem: The product to compute.
        device: The chip to compute it on.
    """
    call = stock_call(problem, device)
    clocks = device.cores * device.clock_ghz * 1e9
    columns = call.geometry.columns
    decoded = problem.k * columns * ceil(problem.n / columns) * call.passes
    decoded *= problem.batch
    slots = decoded * _slots(call, problem, device)
    lane_bytes = decoded * _lane_bytes(call, problem)
    return StockPrediction(
        call=call,
        memory=memory_seconds(_traffic(call, problem), device),
        issue=slots / (SCHEDULERS_PER_CORE * clocks),
        loads=lane_bytes / (LANE_BYTES_PER_CLOCK * clocks),
        stretch=_stretch(call, device),
        reduce=FURTHER_DISPATCH if call.split_k > 1 else 0.0,
        calibrated=_is_calibrated(problem, device),
    )


def _is_calibrated(problem: Problem, device: Device) -> bool:
    """Whether there were times to fit: the published ones of an Ultra contradict."""
    chip = device.generation in ("M3", "M4") and device.tier != "ultra"
    known = (problem.mode, problem.bits) == ("affine", 4)
    return chip and known and DTYPE_BYTES[problem.dtype] == 2 and problem.batch == 1


def _slots(call: StockCall, problem: Problem, device: Device) -> float:
    """Returns the issue slots of a weight that is decoded once."""
    slots = stock_slots(problem)
    if call.family == "qmv_wide":
        return slots.wide[call.rows - FEWEST_WIDE]
    if call.family == "qmm_t_nax":
        # One buffered stage: the cores decode, then the tensor units multiply.
        rate = device.core.tensor_flops_per_clock or ALU_FLOPS
        return slots.tile + 2 * call.rows * SCHEDULERS_PER_CORE / rate
    if call.family.startswith("qmm"):
        products = TILE_PRODUCTS * rates_of(device).matrix_slots
        return (products + slots.tile) * OVERLAP.get(device.generation, 1.0)
    emulated = problem.dtype == "bfloat16" and device.arch_gen < NATIVE_BFLOAT
    return slots.vector * (EMULATED_BFLOAT if emulated else 1)


def _lane_bytes(call: StockCall, problem: Problem) -> float:
    """Returns the bytes that lanes receive for a weight that is decoded once.

    A scale and a bias serve the weights that a lane decodes at a time: a whole group
    in `qmv_wide`, 8 to 32 in the other vector kernels, 8 in the matrix kernels. x
    serves one row of w in `qmv_wide`, and four (or two) in the other vector kernels.
    """
    x_bytes = DTYPE_BYTES[problem.dtype]
    code_bytes = problem.bits / 8
    scale_bytes: float = problem.format.parameters * SCALE_BYTES[problem.scale_dtype]
    if call.family == "qmv_wide":
        return call.rows * x_bytes + code_bytes + scale_bytes / problem.group_size
    if call.family.startswith("qmm"):
        return x_bytes + code_bytes + scale_bytes / 8
    shared = 2 if call.kernel.endswith("_2") else 4  # rows of w with one loading of x
    scale_bytes /= codes_at_a_time(problem.bits)
    return x_bytes / shared + code_bytes + scale_bytes


def _traffic(call: StockCall, problem: Problem) -> int:
    """Returns the bytes that move: every operand once, partial sums in and out."""
    partials = 4 * call.split_k * problem.m * problem.n if call.split_k > 1 else 0
    native = problem.code_bytes + problem.scale_bytes
    return native + problem.activation_bytes + problem.output_bytes + 2 * partials


def _stretch(call: StockCall, device: Device) -> float:
    """Returns the fullest core's share over the mean, more if little runs there."""
    turns = ceil(call.threadgroups / device.cores)
    imbalance = turns * device.cores / call.threadgroups
    simdgroups = turns * call.geometry.simdgroups
    return imbalance * max(1.0, call.geometry.to_fill / simdgroups)
