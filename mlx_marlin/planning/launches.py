"""Grids and threadgroup sizes of kernels that have no plan of their own: the reduce
kernel, which adds the splits of a plan, and the sum of two rows with its RMSNorm."""

from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import SIMD_WIDTH

REDUCE_ROWS = 4
"""Rows of one column that a thread of the reduce kernel adds; `ROWS_OF_THREAD` in
`shaders/lib/reduce.metal` must be the same."""
REDUCE_THREADGROUP = 256
"""Threads of a threadgroup of the reduce kernel. It has no barriers and no threadgroup
memory, so any size is correct; this one is whole simdgroups and every device allows
it. It was not tuned."""
NORM_THREADGROUP = 1024
"""Limit of the threads that add and normalize a row, as in MLX's RMSNorm."""
NORM_SIDE = 4
"""Consecutive values of such a thread; `SIDE` in `shaders/lib/add_norm.metal` must be
the same."""
NORM_TURNS = 4
"""Limit of the times that a thread takes `NORM_SIDE` values, which it keeps in
registers."""


def reduce_threads(problem: Problem) -> int:
    """Returns the threads of the grid: `REDUCE_ROWS` results per thread."""
    return problem.batch * -(-problem.m // REDUCE_ROWS) * problem.n


def reduce_threadgroup(problem: Problem) -> int:
    """Returns the threads of a threadgroup."""
    return min(reduce_threads(problem), REDUCE_THREADGROUP)


def norm_threadgroup(n: int) -> int:
    """Returns the threads that add and normalize a row of n values."""
    simdgroups = -(-n // (NORM_SIDE * SIMD_WIDTH))
    return min(simdgroups * SIMD_WIDTH, NORM_THREADGROUP)


def most_normed() -> int:
    """Returns the limit of the values of a row that is added and normalized."""
    return NORM_THREADGROUP * NORM_SIDE * NORM_TURNS
