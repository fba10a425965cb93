"""What a call of these kernels needs to be preferred to stock MLX: rows and speedup."""

from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.stock.prediction import stock_prediction
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
ONE_ROW_MARGIN = 1.1
"""The same for experts, whose kernel has the main loop of one row: these times are met
within 7 %."""
UNCALIBRATED_MARGIN = 1.3
"""The speedup without fitted published times: the only one of an M1 is 28 % off."""
ULTRA_MARGIN = 1.7
"""The speedup over `qmv_wide` on an Ultra. Relative to one row, the only chain of 4-bit
products published there takes 1.3 to 1.5 times less than predicted for 4 to 8 rows."""


def first_rows(problem: Problem, device: Device) -> int:
    """Returns the fewest rows of a product that may leave stock MLX unmeasured."""
    if device.generation not in MEASURED:
        return 2
    return next(rows for bits, rows in FIRST_ROWS.items() if problem.bits <= bits)


def margin_over_stock(problem: Problem, device: Device) -> float:
    """Returns the speedup over stock MLX that a product needs."""
    stock = stock_prediction(problem, device)
    if stock.calibrated:
        return MARGIN
    wide = stock.call.family == "qmv_wide"
    return ULTRA_MARGIN if wide and device.tier == "ultra" else UNCALIBRATED_MARGIN
