"""The model of stock MLX's products of experts, and who should serve them.

There are no published times of stock MLX's kernels for experts. Its vector kernel is
assumed to read a weight from memory for every pair, even if the previous pair had the
same expert: the hit rate of the caches is not known.
"""

from dataclasses import replace

from benchmarks.stock.decision import UNCALIBRATED_MARGIN
from benchmarks.stock.prediction import stock_prediction, tensor_slots
from benchmarks.stock.slots import stock_slots, vector_slots
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts import gather_seconds, own_times
from mlx_marlin.backends.metal.main_loop import memory_seconds, slots_per_second
from mlx_marlin.planning.gather_plan import GatherProblem

ONE_ROW_MARGIN = 1.1
"""Speedup over stock MLX that is needed where its kernel has the main loop of one row,
whose times are met within 7 %."""
SORTED_ROWS = 16
"""Rows of the tile of stock MLX's kernel for sorted pairs, and the least number of
pairs for which stock MLX uses it."""
SORTED_PAIRS_PER_EXPERT = 4
"""Pairs per expert from which stock MLX uses that kernel."""
TENSOR_ROWS = (32, 64)
"""Rows of the tile of its kernel for tensor units: the larger one from as many pairs
per expert on."""
STOCK_TILE_SLOTS = 0.433
"""Issue slots of that tile for a weight, in addition to the other slots of a tile of 32
rows: its 8x8 products, less half of x (counted for affine 4-bit)."""


def by_our_kernel(gather: GatherProblem, device: Device) -> bool:
    """Returns whether our kernel serves experts in MLX's layout, else stock MLX."""
    if gather.problem.invariant:
        return True
    speedup = stock_seconds(gather, device) / gather_seconds(gather, device)
    return speedup >= _margin(gather, device)


def _margin(gather: GatherProblem, device: Device) -> float:
    """Returns the speedup over stock MLX that the model must predict to leave it.

    Stock MLX's vector kernel multiplies a pair like a product of one row, for which
    times were fitted. That leaves open how often caches hold a weight that was read for
    another pair. It makes no difference where our kernels need no more time than
    reading each weight once.
    """
    memory, issue = own_times(gather, device)
    one_row = stock_prediction(replace(gather.problem, m=1), device)
    fitted = one_row.calibrated and not _shares_tiles(gather)
    return ONE_ROW_MARGIN if fitted and issue <= memory else UNCALIBRATED_MARGIN


def stock_seconds(gather: GatherProblem, device: Device) -> float:
    """Returns the predicted seconds of stock MLX."""
    return gather.weights * _of_one_weight(gather, device)


def _of_one_weight(gather: GatherProblem, device: Device) -> float:
    problem = gather.problem
    expert_bytes, weights = problem.weight_bytes, problem.n * problem.k
    if not _shares_tiles(gather):
        # Every pair reads its weight by itself.
        memory = memory_seconds(problem.m * expert_bytes, device)
        slots = problem.m * weights * vector_slots(problem, device)
        return max(memory, slots / slots_per_second(device))
    chosen = gather.chosen_experts
    rows, tile_slots = _sorted_tile(gather, device)
    tile_slots += stock_slots(problem).tile
    tiles = chosen * -(-round(problem.m / chosen) // rows)
    memory = memory_seconds(round(chosen * expert_bytes), device)
    return max(memory, tiles * weights * tile_slots / slots_per_second(device))


def _shares_tiles(gather: GatherProblem) -> bool:
    """Returns whether stock MLX's matrix kernel serves, whose tiles pairs share."""
    least = max(SORTED_ROWS, SORTED_PAIRS_PER_EXPERT * gather.experts)
    return gather.is_sorted and gather.problem.m >= least


def _sorted_tile(gather: GatherProblem, device: Device) -> tuple[int, float]:
    """Returns the rows of a tile of stock MLX's kernel for sorted pairs, and its slots.

    The slots are those of its matrix products for a weight. On tensor units they take
    as long as in the dense kernel.
    """
    if not device.has_tensor_units:
        return SORTED_ROWS, STOCK_TILE_SLOTS
    few = gather.problem.m < TENSOR_ROWS[1] * gather.experts
    rows = TENSOR_ROWS[0 if few else 1]
    return rows, tensor_slots(rows, device)
