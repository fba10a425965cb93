"""Grid and threadgroup size of the reduce kernel, which adds the splits of a plan."""

from mlx_marlin.planning.problem import Problem

REDUCE_ROWS = 4
"""Rows of one column that a thread of the reduce kernel adds; `ROWS_OF_THREAD` in
`shaders/lib/reduce.metal` must be the same."""
REDUCE_THREADGROUP = 256
"""Threads of a threadgroup of the reduce kernel. It has no barriers and no threadgroup
memory, so any size is correct; this one is whole simdgroups and every device allows
it. It was not tuned."""


def reduce_threads(problem: Problem) -> int:
    """Returns the threads of the grid: `REDUCE_ROWS` results per thread."""
    return problem.batch * -(-problem.m // REDUCE_ROWS) * problem.n


def reduce_threadgroup(problem: Problem) -> int:
    """Returns the threads of a threadgroup."""
    return min(reduce_threads(problem), REDUCE_THREADGROUP)
