"""When stock MLX should serve a call for speed, and why."""

from functools import lru_cache

from mlx_marlin.device import Device
from mlx_marlin.problem import Problem
from mlx_marlin.scheduler.cost import memory_seconds

WIDE_GENERATIONS = ("M3", "M4", "M5")
"""Where stock MLX reads a weight once for up to five rows (its `qmv_wide`)."""
FEW_ROWS = 3
"""Up to so many rows it is then as near to the memory's limit as our kernels."""
PARITY_ROWS = range(26, 33)
"""Rows where the model, fitted on M3 Max and M4 Pro, sees 0.85 to 1.1 times stock's
speed: nothing to promise. Stock's tile has 32 rows and wastes nothing here."""
MOST_ROWS = 64
"""Beyond, a product is bound by arithmetic that 8x8 matrices do not make cheaper."""
TENSOR_ROWS = 9
"""From here on stock leaves its few-row kernel, and on M5 takes the tensor units."""


@lru_cache(maxsize=4096)
def stock_reason(problem: Problem, device: Device) -> str | None:
    """Says why stock MLX should serve a product for speed; None if ours should.

    Only for native weights: a packed weight cannot be handed over.

    Args:
        problem: The product to compute.
        device: The chip to plan for.

    Returns:
        One sentence whose figures come from the model, or None.
    """
    if problem.layout != "mlx":
        return None
    if problem.m == 1:
        floor = memory_seconds(problem.bytes, device) * 1e6
        return (
            f"1 row is bound by reading the weight, {floor:.1f} us by the model for "
            f"any kernel on {device.variant}, and stock MLX is already there"
        )
    if problem.m <= FEW_ROWS and device.generation in WIDE_GENERATIONS:
        return (
            f"{problem.m} rows are bound by reading the weight: on "
            f"{device.generation} stock MLX reads it once for all of them, and the "
            "model sees no gain"
        )
    if problem.m > MOST_ROWS:
        return (
            f"{problem.m} rows are more than {MOST_ROWS}: by the model the product is "
            "bound by arithmetic, where our kernels gain nothing over stock MLX"
        )
    if problem.m in PARITY_ROWS:
        return (
            f"{problem.m} rows are close to stock MLX's tile of 32: the model gives "
            "our kernels 0.85 to 1.1 times its speed, too little to promise"
        )
    if device.has_tensor_units and problem.m >= TENSOR_ROWS:
        return (
            f"{device.generation} has tensor units, which stock MLX uses from about "
            f"{TENSOR_ROWS} rows and our kernels do not: by the chip table they have "
            "4 times the matrix rate"
        )
    return None
