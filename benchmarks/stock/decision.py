"""Who should serve a product, by the models of stock MLX and of our kernels.

`data/handover.json`, which decides where nobody has measured, is made of these.
"""

from typing import Literal

from benchmarks.stock.prediction import stock_prediction
from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.backend import epilogue_seconds, norm_seconds
from mlx_marlin.backends.metal.cost import dequantize_if_faster
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.dequantize_plan import LEAST_ROWS
from mlx_marlin.planning.problem import Problem

MEASURED = ("M3", "M4")
"""Generations for which `FIRST_ROWS` holds: a kernel of `gemm_register`'s design, with
its issue slots, was measured on an M4 Pro in chains (mlx-dspark 0.20.3)."""
FIRST_ROWS = {4: 5, 8: 6}
"""Fewest rows with which that kernel was faster than stock MLX, by most bits of a code:
4 rows of 4 bits took as long, 2 and 3 longer; 5 bits and more are judged as 8."""
MARGIN = 1.15
"""Predicted speedup over stock MLX that a call of these kernels needs. The model meets
published times of chains within 15 %, and leaving a call to stock MLX costs nothing."""
UNCALIBRATED_MARGIN = 1.3
"""The speedup without fitted published times: the only one of an M1 is 28 % off."""
ULTRA_MARGIN = 1.7
"""The speedup over `qmv_wide` on an Ultra. Relative to one row, the only chain of 4-bit
products published there takes 1.3 to 1.5 times less than predicted for 4 to 8 rows."""
Server = Literal["stock", "ours", "decoded"]


def stock_seconds(problem: Problem, device: Device) -> float:
    """Returns the predicted seconds of stock MLX in a chain, with norm and epilogue.

    The epilogue counts as one further operation, as with `mx.compile`.
    """
    others = norm_seconds(problem, device) + epilogue_seconds(problem, device)
    return stock_prediction(problem, device).seconds + others


def speedup(problem: Problem, device: Device) -> float:
    """Returns how many times as fast as stock MLX our kernels are, by the models."""
    return stock_seconds(problem, device) / _own_seconds(problem, device)


def _own_seconds(problem: Problem, device: Device) -> float:
    return planner.propose(problem, device).prediction.seconds


def margin_over_stock(problem: Problem, device: Device) -> float:
    """Returns the speedup over stock MLX that a product needs."""
    stock = stock_prediction(problem, device)
    if stock.calibrated:
        return MARGIN
    wide = stock.call.family == "qmv_wide"
    return ULTRA_MARGIN if wide and device.tier == "ultra" else UNCALIBRATED_MARGIN


def first_rows(problem: Problem, device: Device) -> int:
    """Returns the fewest rows of a product that may leave stock MLX unmeasured."""
    if device.generation not in MEASURED:
        return 2
    return next(rows for bits, rows in FIRST_ROWS.items() if problem.bits <= bits)


def by_our_kernels(problem: Problem, device: Device) -> bool:
    """Returns whether our kernels serve a weight in MLX's layout, else stock MLX."""
    if problem.m < first_rows(problem, device):
        return False
    return speedup(problem, device) >= margin_over_stock(problem, device)


def is_decoded_first(problem: Problem, device: Device) -> bool:
    """Returns whether a weight in MLX's layout is decoded and then multiplied."""
    if problem.m < LEAST_ROWS:
        return False
    others = min(_own_seconds(problem, device), stock_seconds(problem, device))
    others /= margin_over_stock(problem, device)
    return dequantize_if_faster(problem, device, others) is not None


def server(problem: Problem, device: Device) -> Server:
    """Returns who serves a weight in MLX's layout."""
    if problem.invariant:
        return "ours"
    if is_decoded_first(problem, device):
        return "decoded"
    return "ours" if by_our_kernels(problem, device) else "stock"
