"""Small plans that run the same kernel instances as a plan.

An instance (`Launch.instance`) is what the GPU's compiler sees. Two plans with equal
instances run the same machine code, so a result for the small one also holds for the
large one.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial, singledispatch
from typing import TypeVar, cast

from mlx_marlin.backends import selection
from mlx_marlin.backends.launch import distinct
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.gather_plan import GatherPlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.tiles import SIMD_WIDTH
from mlx_marlin.planning.work.work import Work
from mlx_marlin.weights.formats import GROUP_SIZES, SUPER_BLOCK, TILE_K, TILE_N

AnyPlan = Plan | DequantizePlan | GatherPlan
P = TypeVar("P", bound=AnyPlan)

RAGGED_COLUMNS = 19
"""Columns of the last tile: more than two fragments of 8, fewer than four."""
EXPERTS = 5
FEW_PAIRS = 10
"""Number of pairs if a threadgroup computes a pair: then there are more experts."""


def miniatures(plan: P) -> tuple[P, ...]:
    """Returns small plans with the same kernel instances.

    Their m, n and k are ragged if the instance allows it, and k has several groups. If
    an instance serves several strategies, there is a plan for every strategy.
    """
    wanted = instances_of(plan)
    found = [small for small in _smaller(plan) if instances_of(small) == wanted]
    return cast(tuple[P, ...], tuple(found)) or (plan,)


def instances_of(plan: AnyPlan) -> list[tuple[object, ...]]:
    """Returns the kernel instances of a plan's launches."""
    launches = distinct(selection.of_plan(plan).launches(plan))
    return [launch.instance for launch in launches]


@singledispatch
def _smaller(plan: AnyPlan) -> Iterator[AnyPlan]:
    """Yields smaller plans, the one that tests most first."""
    raise TypeError(f"no smaller plan of {plan!r}")


@_smaller.register(Plan)
def _small_products(plan: Plan) -> Iterator[Plan]:
    problem = _small_problem(plan)
    tile = plan.tile
    m_tiles = -(-problem.m // tile.m)
    wide = plan.wide_n if plan.has_wide_tiles else 0
    n_tiles = bool(wide) + -(-(problem.n - wide) // tile.n)
    tiles = problem.batch * m_tiles * n_tiles
    works = _small_work(plan, tiles, -(-problem.k // tile.k), m_tiles)
    for work in works:
        with suppress(ValueError):  # the kernel does not support this work
            yield replace(plan, problem=problem, work=work)


def _small_problem(plan: Plan) -> Problem:
    problem = plan.problem
    group_size, k = _small_k(problem, _least_k(plan))
    n = _small_n(plan)
    return replace(
        problem,
        m=_small_m(plan),
        n=n,
        k=k,
        batch=min(problem.batch, 2),
        group_size=group_size,
        epilogue=_small_epilogue(problem.epilogue, n),
        invariant=False,  # it restricts the choice of plans, not the kernel
    )


def _small_m(plan: Plan) -> int:
    if plan.kernel == "gemv":
        return plan.tile.m
    if plan.problem.norm is not None:
        return min(plan.problem.m, 5)
    return (plan.row_limit or 2 * plan.tile.m) - 3


def _small_n(plan: Plan) -> int:
    """Returns columns of some whole tiles and, if possible, part of another one."""
    problem = plan.problem
    if problem.epilogue.rotation is not None:
        return problem.n  # it is a template argument
    if problem.epilogue.gated:
        return 2 * (
            plan.tile.n - (problem.columns % TILE_N and TILE_N - RAGGED_COLUMNS)
        )
    has_ragged_template = plan.kernel in ("gemv", "gemm_register", "gemm_staged")
    ragged = problem.n % TILE_N != 0 or not has_ragged_template
    first = plan.wide_n + TILE_N if plan.has_wide_tiles else plan.tile.n
    if plan.tile.n == TILE_N:
        first += 2 * TILE_N  # enough tiles for two groups of stream-K
    return first + (RAGGED_COLUMNS if ragged else TILE_N)


def _least_k(plan: Plan) -> int:
    """Returns the least k that gives some slices two k tiles and fills the stages."""
    steps = (plan.simdgroups_k + 2) * plan.tile.k
    return max(steps, (plan.buffers + 1) * plan.stage_k if plan.buffers else 0)


def _small_k(problem: Problem, least: int) -> tuple[int, int]:
    """Returns a group size for the same instance, and a k of at least two groups.

    K-quants get at least two super-blocks.
    """
    size = problem.group_size
    if size not in GROUP_SIZES:  # a whole row
        k = -(-least // TILE_K) * TILE_K
        k += TILE_K if k in GROUP_SIZES else 0
        return k, k
    unit = problem.format.k_multiple(size)
    record = SUPER_BLOCK if problem.format.has_super_blocks else size
    k = max(-(-least // unit), -(-2 * record // unit)) * unit
    if unit == 32 and k % TILE_K == 0:
        k += 32  # half of a packed tile
    return size, k


def _small_epilogue(epilogue: Epilogue, n: int) -> Epilogue:
    if not epilogue.parts or epilogue.rotation is not None:
        return epilogue
    count = len(epilogue.parts)
    parts = [n // count - index for index in range(count - 1)]
    return replace(epilogue, parts=(*parts, n - sum(parts)))


def _small_work(plan: Plan, tiles: int, k_tiles: int, m_tiles: int) -> Iterator[Work]:
    """Yields work for the instance, the one that tests most of it first."""
    strategy = plan.work.strategy
    if strategy == "data_parallel":
        yield data_parallel(tiles, k_tiles)
    elif strategy == "hytis":
        yield Work(
            strategy="hytis",
            tiles=tiles,
            k_tiles=k_tiles,
            threadgroups=tiles,
            whole=m_tiles,
        )
    else:
        yield from (_split_work if plan.is_split else _runs)(tiles, k_tiles)


def _runs(tiles: int, k_tiles: int) -> Iterator[Work]:
    """Yields stripes of whole tiles: of several tiles, then of at most one."""
    for threadgroups in (max(tiles - 1, 1), tiles + 1):
        yield Work(
            strategy="stripe", tiles=tiles, k_tiles=k_tiles, threadgroups=threadgroups
        )


def _split_work(tiles: int, k_tiles: int) -> Iterator[Work]:
    work = partial(Work, tiles=tiles, k_tiles=k_tiles)
    streams = partial(work, slices=k_tiles)
    yield work(strategy="split_k", slices=2, threadgroups=2 * tiles)
    # Splits that do not end where a tile does.
    yield streams(strategy="stream_k", threadgroups=2 * tiles - 1)
    if tiles % 2 == 0:
        yield streams(strategy="stream_k", threadgroups=tiles + 4, groups=2)
    if tiles > 1:
        yield streams(strategy="hybrid", threadgroups=tiles + 2, whole=1)
    yield work(
        strategy="stripe",
        slices=min(k_tiles, 3),
        threadgroups=min(k_tiles, 3) * tiles - 2,
        partition="ceil",
    )


@_smaller.register(DequantizePlan)
def _small_dequantized(plan: DequantizePlan) -> Iterator[DequantizePlan]:
    problem = plan.problem
    group_size, k = _small_k(problem, 3 * TILE_K)
    n = TILE_N + RAGGED_COLUMNS
    small = replace(
        problem,
        m=1,
        n=n,
        k=k,
        group_size=group_size,
        batch=1,
        epilogue=PLAIN,  # the matrix product after it is MLX's
        norm=None,
        invariant=False,
    )
    yield DequantizePlan(problem=small, transposed=True, chunk=TILE_N)
    yield DequantizePlan(problem=small, transposed=False, chunk=TILE_K)


@_smaller.register(GatherPlan)
def _small_gather(plan: GatherPlan) -> Iterator[GatherPlan]:
    """Yields a plan in which one expert has more pairs than a tile has rows."""
    per_row = plan.pairs_per_row or 1
    pairs = FEW_PAIRS if plan.by_pair else 2 * plan.rows + 2 * SIMD_WIDTH + 5
    pairs = -(-pairs // per_row) * per_row
    group_size, k = _small_k(plan.problem, (plan.simdgroups_k + 2) * TILE_K)
    problem = replace(
        plan.problem,
        m=pairs,
        n=plan.columns + (RAGGED_COLUMNS if plan.has_ragged_tiles else TILE_N),
        k=k,
        group_size=group_size,
        invariant=False,
    )
    experts = pairs + 2 if plan.by_pair else EXPERTS
    with suppress(ValueError):
        gather = replace(
            plan.gather,
            problem=problem,
            experts=experts,
            pairs_per_row=plan.pairs_per_row,
        )
        yield replace(plan, gather=gather)
