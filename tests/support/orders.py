"""In which order a plan promises to add: bits, not tolerances."""

from collections.abc import Callable, Iterable
from functools import reduce

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_marlin.backends.cuda.plan import CudaPlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import step_k
from support.drawn_arrays import Native
from support.oracles import exact
from support.parts_of_plans import corner, k_range, product_of

Vector = NDArray[np.float32]
TRIP = 64
"""Values of k between which nothing but the order of addition rounds."""
TRIPS_OF_STAGE = 2
"""Of a stage of CUDA's kernels."""
LARGE = {"float16": 2.0**13, "bfloat16": 2.0**16}
"""Far above small values: while it is in a float32 sum, their last bits are lost."""


def trips(problem: Problem) -> Vector:
    """Draws one activation [trips, m] for each trip of the main loop.

    Of a batch, the rows of all products. In narrow dtypes most are small, and two are
    large and cancel, so that the result shows which were added between them.
    """
    count = -(-problem.k // TRIP)
    size = count, problem.batch * problem.m
    random = np.random.default_rng(0)
    values = random.standard_normal(size, np.float32)
    if problem.dtype not in LARGE:
        return values
    values /= 16
    for row, large in zip(
        values.T, LARGE[problem.dtype] * (1 + values[0]), strict=True
    ):
        first, second = random.permutation(count)[:2]
        row[first], row[second] = large, -large
    narrow = mx.array(values).astype(getattr(mx, problem.dtype))
    return np.array(narrow.astype(mx.float32))


def one_in_each_trip(problem: Problem) -> mx.array:
    """Returns activations [m, k] that are zero but for the first of each trip."""
    values = trips(problem)
    x = np.zeros((*values.T.shape, TRIP), np.float32)
    x[..., 0] = values.T
    rows = x.reshape(x.shape[0], -1)[:, : problem.k]
    given = mx.array(rows.reshape(*problem.result_shape[:-1], problem.k))
    return given.astype(getattr(mx, problem.dtype))


def ones(problem: Problem) -> Native:
    """Returns a weight of ones: every code is 1, and exact in any kernel."""
    rows = (*problem.result_shape[:-2], problem.n)
    dtype = getattr(mx, problem.scale_dtype)
    return (
        mx.full((*rows, problem.k // 8), 0x11111111, mx.uint32),
        mx.ones((*rows, problem.groups), dtype),
        mx.zeros((*rows, problem.groups), dtype),
    )


def assert_promised(y: mx.array, plan: Plan) -> None:
    """Checks the bits of the product of both."""
    expected = mx.array(promised(plan)).astype(y.dtype)
    np.testing.assert_array_equal(exact(y), exact(expected))


def promised(plan: Plan) -> Vector:
    """Returns the product [m, n] of the two, added as the plan promises.

    The trips of a simdgroup ascend, then the simdgroups of a split, then the splits of
    a tile.
    """
    problem = plan.problem
    values = trips(problem)
    sums: dict[int, dict[int, Vector]] = {}
    for threadgroup in range(plan.num_threadgroups):
        for split in plan.work.splits(threadgroup):
            own = values[slice(*(-(-k // TRIP) for k in k_range(plan, split)))]
            is_wide = plan.columns_of(split.tile) > plan.tile.n
            turns = plan.simdgroups_k // (plan.simdgroups_n if is_wide else 1)
            turn_of = _turns(plan, len(own), turns)
            total = ascending(ascending(own[turn_of == turn]) for turn in range(turns))
            sums.setdefault(split.tile, {})[split.k_idx] = total
    out = np.full((problem.batch * problem.m, problem.n), np.nan, np.float32)
    for tile, splits in sums.items():
        total = ascending(splits[k_idx] for k_idx in sorted(splits))
        row, col = corner(plan, tile)
        first = product_of(plan, tile) * problem.m
        rows = slice(first + row, first + min(row + plan.tile.m, problem.m))
        out[rows, col : col + plan.columns_of(tile)] = total[rows, None]
    return out.reshape(problem.result_shape)


def _turns(plan: Plan, count: int, turns: int) -> NDArray[np.int64]:
    """Returns which simdgroup along k takes each trip of a split."""
    trip = np.arange(count)
    if not isinstance(plan, CudaPlan):
        # They take turns at trips, where they are staged at steps.
        steps = TRIP // step_k(plan.problem.group_size) if plan.buffers else 1
        return trip * steps % turns
    if plan.buffers:
        return trip // TRIPS_OF_STAGE % turns
    ends = [count * (turn + 1) // turns for turn in range(turns)]
    return np.searchsorted(ends, trip, side="right")


def check_sum_of_experts(combine: Callable[..., mx.array]) -> None:
    """Checks the bits of a residual and rows of experts, with scores of 1."""
    values = np.random.default_rng(0).standard_normal((3, 9, 40), np.float32)
    rows = mx.array(values[:, :8])
    total = combine(rows[..., None, :], mx.ones((3, 8)), mx.array(values[:, 8]))
    added = ascending(values[:, choice] for choice in range(8))
    np.testing.assert_array_equal(np.array(total), values[:, 8] + added)


def ascending(addends: Iterable[Vector]) -> Vector:
    """Adds one after the other, in float32."""
    return reduce(np.add, addends, np.float32(0))  # type: ignore[arg-type]
