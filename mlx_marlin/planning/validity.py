"""Whether the fields of a plan fit its kernel, its problem and each other.

What CUDA's kernels alone ask for stands with them, in `mma` and `staged_x`.
"""

from math import prod
from typing import TYPE_CHECKING

from mlx_marlin.backends.cuda import mma, pipelined
from mlx_marlin.backends.metal.limits import (
    FRAGMENT,
    FRAGMENTS_M,
    GEMV_ROWS,
    KERNELS,
    MAX_SIMDGROUPS,
    REDUCTIONS,
    THREADGROUP_LIMIT,
    k_tile,
)
from mlx_marlin.backends.metal.staging import BUFFERS
from mlx_marlin.planning.problem import MOST_ELEMENTS
from mlx_marlin.weights.formats import TILE_N

if TYPE_CHECKING:
    from mlx_marlin.planning.plan import Plan


def check(plan: "Plan") -> None:
    """Checks the fields of a plan, one by one and against each other.

    Raises:
        ValueError: If no kernel can have them.
    """
    if plan.kernel not in KERNELS:
        raise ValueError(f"kernel={plan.kernel!r} is not one of {KERNELS}")
    _check_staging(plan)
    if plan.kernel == "gemv":
        _check_gemv(plan)
    elif plan.kernel == "mma":
        _check_mma(plan)
    elif plan.has_staged_x:
        _check_staged_x(plan)
    else:
        _check_gemm(plan)
    _check_norm(plan)
    _check_threadgroup(plan)
    _check_work(plan)
    _check_reduction(plan)
    _check_paired(plan)
    _check_invariant(plan)


def _check_staging(plan: "Plan") -> None:
    if plan.has_staged_x:
        return
    if plan.kernel != "gemm_staged":
        if (plan.buffers, plan.loaders) != (0, 0):
            raise ValueError(
                f"{plan.kernel} has buffers=0 and loaders=0, got "
                f"buffers={plan.buffers}, loaders={plan.loaders}"
            )
        return
    if plan.problem.batch > 1:
        raise ValueError(
            f"gemm_staged takes one weight, got batch={plan.problem.batch}"
        )
    if plan.buffers not in BUFFERS:
        raise ValueError(f"buffers={plan.buffers} is not one of {BUFFERS}")
    if plan.loaders < 0:
        raise ValueError(f"loaders={plan.loaders} must be at least 0")
    if plan.loaders and plan.buffers == 1:
        raise ValueError(
            f"loaders={plan.loaders} would wait with buffers=1 whenever the others "
            f"multiply, expected 2 or 3 buffers"
        )


def _check_gemv(plan: "Plan") -> None:
    most = GEMV_ROWS[plan.problem.dtype]
    if plan.problem.m > most:
        raise ValueError(
            f"gemv takes at most {most} rows of {plan.problem.dtype}, "
            f"got m={plan.problem.m}"
        )
    if (plan.fragments_m, plan.simdgroups_m) != (0, 1):
        raise ValueError(
            "gemv has fragments_m=0 and simdgroups_m=1, got "
            f"fragments_m={plan.fragments_m}, simdgroups_m={plan.simdgroups_m}"
        )
    if plan.tile.m != plan.problem.m:
        raise ValueError(
            f"a gemv tile has all m={plan.problem.m} rows, got tile.m={plan.tile.m}"
        )


def _check_gemm(plan: "Plan") -> None:
    if plan.fragments_m not in FRAGMENTS_M:
        raise ValueError(f"fragments_m={plan.fragments_m} is not one of {FRAGMENTS_M}")
    rows = FRAGMENT * plan.fragments_m * plan.simdgroups_m
    if plan.tile.m != rows:
        raise ValueError(
            f"fragments_m={plan.fragments_m} and simdgroups_m={plan.simdgroups_m} "
            f"make tiles of {rows} rows, got tile.m={plan.tile.m}"
        )


def _check_mma(plan: "Plan") -> None:
    mma.check(
        plan.problem,
        fragments_m=plan.fragments_m,
        simdgroups_m=plan.simdgroups_m,
        simdgroups_n=plan.simdgroups_n,
        simdgroups_k=plan.simdgroups_k,
        tile_m=plan.tile.m,
        tile_n=plan.tile.n,
        subtract=plan.subtract,
    )


def _check_staged_x(plan: "Plan") -> None:
    pipelined.check(
        plan.problem,
        kernel=plan.kernel,
        fragments_m=plan.fragments_m,
        simdgroups_m=plan.simdgroups_m,
        simdgroups_n=plan.simdgroups_n,
        simdgroups_k=plan.simdgroups_k,
        buffers=plan.buffers,
        loaders=plan.loaders,
        tile_m=plan.tile.m,
        tile_n=plan.tile.n,
        subtract=plan.subtract,
    )


def _check_threadgroup(plan: "Plan") -> None:
    on_cuda = plan.on_cuda
    columns = TILE_N * plan.simdgroups_n if on_cuda else TILE_N
    sides = columns, k_tile(plan.problem.group_size)
    if (plan.tile.n, plan.tile.k) != sides:
        raise ValueError(
            f"tile.n and tile.k are {sides[0]} and {sides[1]} for groups of "
            f"{plan.problem.group_size}, got {plan.tile.n} and {plan.tile.k}"
        )
    if plan.simdgroups_m < 1 or plan.simdgroups_k < 1:
        raise ValueError(
            f"simdgroups_m={plan.simdgroups_m} and simdgroups_k="
            f"{plan.simdgroups_k} must be at least 1"
        )
    if plan.simdgroups > MAX_SIMDGROUPS and not on_cuda:
        further = f" and loaders={plan.loaders}" if plan.loaders else ""
        raise ValueError(
            f"simdgroups_m={plan.simdgroups_m} x simdgroups_k={plan.simdgroups_k}"
            f"{further} is more than {MAX_SIMDGROUPS} simdgroups in a threadgroup"
        )
    limit = mma.SHARED_LIMIT if on_cuda else THREADGROUP_LIMIT
    if plan.threadgroup_bytes > limit:
        each = f"buffers={plan.buffers} of {plan.stage_bytes} bytes make "
        raise ValueError(
            f"{each if plan.buffers else ''}{plan.threadgroup_bytes} bytes of "
            f"threadgroup memory, more than {limit}"
        )


def _check_work(plan: "Plan") -> None:
    wide = plan.has_wide_tiles
    if plan.on_cuda:
        if wide:
            raise ValueError(
                f"{plan.kernel} has tiles of one width, got strategy='hytis'"
            )
    elif (
        plan.simdgroups_n < 1
        or wide != (plan.simdgroups_n > 1)
        or plan.simdgroups_k % plan.simdgroups_n
    ):
        raise ValueError(
            f"simdgroups_n={plan.simdgroups_n} must be 1, or for hytis a divisor "
            f"of simdgroups_k={plan.simdgroups_k} above 1"
        )
    if wide and plan.work.whole % plan.m_tiles:
        raise ValueError(
            f"whole={plan.work.whole} wide tiles do not make whole columns of "
            f"{plan.m_tiles} tiles"
        )
    if wide and plan.wide_columns * plan.wide_n >= plan.problem.n:
        raise ValueError(
            f"whole={plan.work.whole} wide tiles leave no column of "
            f"n={plan.problem.n} for narrow ones"
        )
    if wide and plan.problem.batch > 1:
        raise ValueError(
            f"hytis takes one weight, got batch={plan.problem.batch}: wide tiles "
            f"would end in another product's"
        )
    expected = plan.problem.batch * plan.m_tiles * plan.n_tiles, plan.k_tiles
    if (plan.work.tiles, plan.work.k_tiles) != expected:
        raise ValueError(
            f"the product has {expected[0]} tiles of {expected[1]} k tiles, got "
            f"work with {plan.work.tiles} of {plan.work.k_tiles}"
        )


def _check_reduction(plan: "Plan") -> None:
    if plan.reduction not in REDUCTIONS:
        raise ValueError(f"reduction={plan.reduction!r} is not one of {REDUCTIONS}")
    if plan.on_cuda and plan.reduction == "atomic":
        raise ValueError(f"{plan.kernel} has no atomic sums, got reduction='atomic'")
    if (plan.reduction == "none") == plan.work.is_split:
        raise ValueError(
            f"reduction={plan.reduction!r} does not fit work whose tiles "
            f"{'are' if plan.work.is_split else 'are not'} split"
        )
    if prod(plan.workspace_shape) >= MOST_ELEMENTS:
        raise ValueError(
            f"k_parallel={plan.work.slices} makes a workspace of "
            f"{plan.workspace_shape}, expected fewer than {MOST_ELEMENTS} elements"
        )


def _check_paired(plan: "Plan") -> None:
    """Checks that all sums that make a result meet in a threadgroup."""
    epilogue = plan.problem.epilogue
    if not epilogue.is_paired:
        return
    asked = "gated=True" if epilogue.gated else f"rotation={epilogue.rotation}"
    least = mma.least_tiles(plan.problem)
    if not plan.on_cuda or plan.simdgroups_n % least or plan.is_split:
        raise ValueError(
            f"{asked} needs a CUDA kernel, a multiple of {least} as simdgroups_n "
            f"and reduction='none', got kernel={plan.kernel!r}, "
            f"simdgroups_n={plan.simdgroups_n}, reduction={plan.reduction!r}"
        )


def _check_norm(plan: "Plan") -> None:
    """Checks that whole rows are multiplied, by the kernel that normalizes them."""
    if plan.problem.norm is None:
        return
    if plan.kernel != "mma" or plan.is_split:
        raise ValueError(
            f"norm={plan.problem.norm} needs kernel='mma' and reduction='none', got "
            f"kernel={plan.kernel!r}, reduction={plan.reduction!r}"
        )


def _check_invariant(plan: "Plan") -> None:
    if not plan.problem.invariant:
        return
    exact = plan.kernel == "gemm_register" and plan.subtract
    kept = (
        (exact or plan.kernel == "mma")
        and plan.reduction != "atomic"
        and plan.work.strategy in ("data_parallel", "split_k")
    )
    if not kept:
        raise ValueError(
            "invariant=True needs gemm_register, subtract=True, and data_parallel "
            "or split_k without atomics (or mma, likewise, without subtract), got "
            f"kernel={plan.kernel!r}, "
            f"subtract={plan.subtract}, strategy={plan.work.strategy!r}, "
            f"reduction={plan.reduction!r}"
        )
