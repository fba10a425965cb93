"""Makes plans for cases: ranges, slices, streams and wide tiles."""

from dataclasses import replace
from functools import partial
from typing import Any

from mlx_marlin.backends.metal.plan import MetalPlan, columns_of_tile
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.tiles import Kernel, Reduction, Tile, k_tile
from mlx_marlin.planning.work.work import Partition, Work
from mlx_marlin.weights.formats import TILE_N, format_of


def problem_of(
    m: int,
    n: int,
    groups: int,
    group_size: int,
    dtype: str,
    layout: str,
    epilogue: Epilogue = PLAIN,
    *,
    mode: str = "affine",
    bits: int = 4,
    **more: Any,
) -> Problem:
    """Returns a problem whose k is so many groups, with more of its fields."""
    return Problem(
        m=m,
        n=n,
        k=groups * group_size,
        group_size=group_size,
        bits=bits,
        mode=mode,
        dtype=dtype,
        scale_dtype=format_of(mode, bits).scale_dtype(dtype),
        layout=layout,
        epilogue=epilogue,
        **more,
    )


def whole_tiles(
    *shape: Any,
    fragments_m: int = 0,
    simdgroups_m: int = 1,
    simdgroups_k: int = 2,
    operand: CodeForm = "exact",
    kernel: Kernel | None = None,
    **more: Any,
) -> Plan:
    """Returns a plan with one tile a threadgroup.

    The problem is that of `problem_of(*shape, **more)`. The kernel is `gemm_register`,
    or `gemv` without fragments, if it is not given.
    """
    problem = problem_of(*shape, **more)
    rows = 8 * fragments_m * simdgroups_m if fragments_m else problem.m
    columns = columns_of_tile(problem)
    tile = Tile(m=rows, n=columns, k=k_tile(problem.group_size))
    tiles = problem.batch * -(-problem.m // tile.m) * -(-problem.n // tile.n)
    return MetalPlan(
        problem=problem,
        kernel=kernel or ("gemm_register" if fragments_m else "gemv"),
        tile=tile,
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_n=columns // TILE_N,
        simdgroups_k=simdgroups_k,
        work=data_parallel(tiles, -(-problem.k // tile.k)),
        operand=operand,
    )


native = partial(whole_tiles, dtype="float32", layout="mlx")
packed = partial(whole_tiles, dtype="float32", layout="marlin")


def in_ranges(
    division: tuple[int, int, int, int, int],
    *shape: Any,
    partition: Partition = "balanced",
    operand: CodeForm = "offset",
    reduction: Reduction = "workspace",
    **more: Any,
) -> Plan:
    """Returns a plan whose ranges are runs of slices.

    `division` is: fragments_m, simdgroups_m, simdgroups_k, slices, threadgroups; the
    problem is that of `problem_of(*shape, **more)`.
    """
    fragments_m, simdgroups_m, simdgroups_k, slices, threadgroups = division
    plan = whole_tiles(
        *shape,
        fragments_m=fragments_m,
        simdgroups_m=simdgroups_m,
        simdgroups_k=simdgroups_k,
        operand=operand,
        **more,
    )
    work = Work(
        strategy="stripe",
        tiles=plan.work.tiles,
        k_tiles=plan.k_tiles,
        threadgroups=threadgroups,
        slices=slices,
        partition=partition,
    )
    return replace(plan, work=work, reduction=reduction if work.is_split else "none")


def in_two_slices(plan: Plan) -> Plan:
    """Returns a plan that splits every tile in two."""
    work = replace(
        plan.work,
        strategy="split_k",
        threadgroups=2 * plan.work.tiles,
        whole=0,
        slices=2,
    )
    return replace(plan, work=work, reduction="workspace")


def staged(buffers: int, plan: Plan, loaders: int = 0) -> Plan:
    """Returns the plan of the staged kernel."""
    return replace(plan, kernel="gemm_staged", buffers=buffers, loaders=loaders)


def streams(
    threadgroups: int, plan: Plan, *, whole: int = 0, minimum: int = 1, groups: int = 1
) -> Plan:
    """Returns a plan whose ranges are streams."""
    work = Work(
        strategy="hybrid" if whole else "stream_k",
        tiles=plan.work.tiles,
        k_tiles=plan.k_tiles,
        threadgroups=threadgroups,
        whole=whole,
        slices=plan.k_tiles,
        minimum=minimum,
        groups=groups,
    )
    return replace(plan, work=work, reduction="workspace")


def wide_tiles(plan: Plan) -> Plan:
    """Returns a plan with two columns of tiles of two simdgroups, then narrow ones."""
    whole = 2 * plan.m_tiles
    tiles = whole + plan.m_tiles * (plan.n_tiles - 4)
    work = replace(data_parallel(tiles, plan.k_tiles), strategy="hytis", whole=whole)
    return replace(plan, work=work, simdgroups_n=2)
