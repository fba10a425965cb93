"""When stock MLX should serve a call for speed, and why."""

from mlx_marlin.backends.metal.cost import FURTHER_DISPATCH, memory_seconds
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.stock.prediction import StockPrediction, stock_prediction
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.prediction import Prediction
from mlx_marlin.planning.problem import Problem

MARGIN = 1.1
"""How many times stock MLX's speed our kernels must be predicted to have. The model
meets published times within 10 %; a call that is left with stock costs nothing."""
UNCALIBRATED_MARGIN = 1.3
"""Likewise where no published time was fitted: the only one of an M1 is 28 % off."""


def stock_seconds(problem: Problem, device: Device) -> float:
    """Returns what stock MLX should take for a product and its epilogue.

    The epilogue counts as one operation more, as `mx.compile` would make it.
    """
    seconds = stock_prediction(problem, device).seconds
    if problem.epilogue == PLAIN:
        return seconds
    moved = (2 + problem.epilogue.operands) * problem.output_bytes
    return seconds + FURTHER_DISPATCH + memory_seconds(moved, device)


def margin_over_stock(problem: Problem, device: Device) -> float:
    """Returns how many times stock MLX's speed a product must have to leave it."""
    calibrated = stock_prediction(problem, device).calibrated
    return MARGIN if calibrated else UNCALIBRATED_MARGIN


def handover(problem: Problem, device: Device, ours: Prediction) -> str | None:
    """Says why stock MLX should serve a product for speed; None if ours should.

    Only for native weights: a packed weight cannot be handed over, and stock MLX does
    not promise the same bits for any number of rows.

    Args:
        problem: The product to compute.
        device: The chip to plan for.
        ours: What the model says about our plan.

    Returns:
        One sentence whose figures come from the model, or None.
    """
    if problem.layout != "mlx" or problem.invariant:
        return None
    # A launch each: where it is most of the time, there is nothing to win.
    theirs = FURTHER_DISPATCH + stock_seconds(problem, device)
    ratio = theirs / (FURTHER_DISPATCH + ours.seconds)
    if problem.m == 1:
        floor = memory_seconds(problem.bytes, device) * 1e6
        return (
            f"1 row is bound by reading the weight, {floor:.1f} us by the model for "
            f"any kernel on {device.variant}, and stock MLX is already there"
        )
    stock = stock_prediction(problem, device)
    margin = margin_over_stock(problem, device)
    if ratio >= margin:
        return None
    return (
        f"{problem.m} rows on {device.variant}: the model gives our kernels "
        f"{ratio:.2f} times the speed of stock MLX's {stock.call.kernel}, bound by "
        f"{_bound(stock)}, and leaving it takes {margin:.2f}"
    )


def _bound(stock: StockPrediction) -> str:
    return "reading the weight" if stock.bound == "memory" else stock.bound
