"""Products for which `gemm_tensor` is a candidate.

Each gate excludes products for which published kernels with tensor operations gained
nothing or lost (docs/m5.md): few rows, small products, and slower chips.
"""

from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.plan import tensor_reason
from mlx_marlin.planning.problem import Problem

LEAST_ROWS = 6
"""Fewest rows. Published vector kernels win at 1 to 5."""
MOST_ROWS = 64
"""Most rows: those of the largest tile, for which a weight is read once."""
LEAST_OF_SLOWER_CHIPS = 9
"""Fewest rows on chips with fewer cores than a Max, where 8x8 products won at 5 to 8
(M5 and M5 Pro, krcm0209/sous)."""
FEW_ROWS = 11
"""Most rows that need a large weight."""
LARGE_WEIGHT = 16e6
"""Weights of a large one: 1024x2048 lost 19 to 20 % at 8 rows (pierre427/mlx2)."""
LEAST_COLUMNS = 2048
"""Fewest columns. Key and value projections of 1024 gained nothing (mlx-serve#99)."""


def is_candidate(problem: Problem, device: Device) -> bool:
    """Returns whether plans of `gemm_tensor` are compared with others."""
    if tensor_reason(problem) is not None:
        return False
    fast = device.tier in ("max", "ultra")
    least = LEAST_ROWS if fast else LEAST_OF_SLOWER_CHIPS
    weights = problem.batch * problem.n * problem.k
    return (
        least <= problem.m <= MOST_ROWS
        and problem.batch * problem.n >= LEAST_COLUMNS
        and (problem.m > FEW_ROWS or weights >= LARGE_WEIGHT)
        and not problem.invariant
    )
