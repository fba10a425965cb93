"""The predicted speedup over stock MLX that a call of these kernels needs."""

from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.stock.prediction import stock_prediction
from mlx_marlin.planning.problem import Problem

MARGIN = 1.15
"""Predicted speedup over stock MLX that a call of these kernels needs. The model meets
published times of chains within 15 %, and leaving a call to stock MLX costs nothing."""
UNCALIBRATED_MARGIN = 1.3
"""The same without fitted published times: the only one of an M1 is 28 % off."""


def margin_over_stock(problem: Problem, device: Device) -> float:
    """Returns the speedup over stock MLX that a product needs."""
    calibrated = stock_prediction(problem, device).calibrated
    return MARGIN if calibrated else UNCALIBRATED_MARGIN
