"""Decides when stock MLX serves a call because it is predicted to be faster."""

from mlx_marlin.backends.metal.cost.rates import level_seconds, memory_seconds
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.stock.margin import first_rows, margin_over_stock
from mlx_marlin.backends.metal.stock.prediction import StockPrediction, stock_prediction
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import MODEL_ERROR, Prediction


def stock_seconds(problem: Problem, device: Device) -> float:
    """Returns the predicted seconds of stock MLX for a product and its epilogue.

    The time is that in a chain. The epilogue counts as one further operation, as with
    `mx.compile`.
    """
    seconds = stock_prediction(problem, device).seconds
    others = _norm_seconds(problem, device) + _epilogue_seconds(problem, device)
    return seconds + others


def faster_apart(
    problem: Problem, device: Device, product: float, fused: float
) -> str | None:
    """Returns why separate operations are predicted to be faster, or None.

    They must be faster by `MODEL_ERROR`: a caller asks for one kernel.

    `product`: predicted seconds of the best plan without the norm, or without the
    epilogue.
    `fused`: predicted seconds of the best plan with it.
    """
    norm = _norm_seconds(problem, device)
    apart = product + (norm or _epilogue_seconds(problem, device))
    if fused <= apart * (1 + MODEL_ERROR):
        return None
    return (
        f"{problem.m} {'row' if problem.m == 1 else 'rows'} on {device.variant}: the "
        f"model gives a product and its {'norm' if norm else 'epilogue'} "
        f"{apart * 1e6:.1f} us as separate operations, and {fused * 1e6:.1f} us as "
        f"one kernel"
    )


def _norm_seconds(problem: Problem, device: Device) -> float:
    """Returns the predicted seconds of an RMSNorm of x as an operation of its own."""
    if problem.norm is None:
        return 0.0
    moved = 2 * problem.activation_bytes
    return level_seconds(device) + memory_seconds(moved, device)


def _epilogue_seconds(problem: Problem, device: Device) -> float:
    """Returns the predicted seconds of an epilogue as one operation of its own."""
    epilogue = problem.epilogue
    if epilogue == PLAIN:
        return 0.0
    moved = (2 + epilogue.operands + epilogue.gated) * problem.output_bytes
    return level_seconds(device) + memory_seconds(moved, device)


def handover(problem: Problem, device: Device, prediction: Prediction) -> str | None:
    """Returns why stock MLX serves a product for speed; None if it does not.

    The result is None for packed weights, which stock MLX cannot read, and for
    invariant products, which it does not support.
    """
    if problem.layout != "mlx" or problem.invariant:
        return None
    stock = stock_prediction(problem, device)
    # Both include a launch: if it dominates, no kernel is faster.
    ratio = stock_seconds(problem, device) / prediction.seconds
    if problem.m == 1 and (problem.epilogue.gated or problem.norm is not None):
        return (
            f"1 row on {device.variant}: the model gives our kernels {ratio:.2f} times "
            f"the speed of stock MLX's separate operations, and one row of a weight in "
            f"MLX's layout stays with stock MLX"
        )
    if problem.m == 1:
        floor = max(stock.memory, stock.issue, stock.loads) * 1e6
        return (
            f"1 row is bound by {_bound(stock)}, {floor:.1f} us by the model on "
            f"{device.variant}, and one row of a weight in MLX's layout stays with "
            f"stock MLX"
        )
    first = first_rows(problem, device)
    if problem.m < first:
        return (
            f"{problem.m} rows on {device.variant}: with codes of {problem.bits} bits "
            f"a kernel like ours was measured to be faster than stock MLX from {first} "
            f"rows on, and nothing was measured on this machine"
        )
    margin = margin_over_stock(problem, device)
    if ratio >= margin:
        return None
    return (
        f"{problem.m} rows on {device.variant}: the model gives our kernels "
        f"{ratio:.2f} times the speed of stock MLX's {stock.call.kernel} in a chain, "
        f"bound by {_bound(stock)}, and leaving it takes {margin:.2f}"
    )


def _bound(stock: StockPrediction) -> str:
    return "reading the weight" if stock.bound == "memory" else stock.bound
