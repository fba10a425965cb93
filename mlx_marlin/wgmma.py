"""What the CUDA kernel "wgmma" can compute, and what a plan of it must look like.

Hopper's matrix products of four warps take x from shared memory, which four further
warps fill stage by stage, and so pay from more rows on than "mma" does. A tile has
`simdgroups_n` packed tiles side by side, four to four warps, and each `simdgroups_k`
of those; `buffers` stages of 128 values of k wait in shared memory.
"""

from math import lcm

from mlx_marlin import mma
from mlx_marlin.formats import TILE_N
from mlx_marlin.problem import Problem

FRAGMENTS_M = (2, 3, 4, 6, 8)
"""Fragments of 8 rows of x in a tile."""
WARPGROUP = 4
"""Warps that multiply together, each its own packed tile (NVIDIA, PTX ISA, wgmma)."""
LOADERS = 4
"""Warps that fill stages."""
STAGE_K = 128
"""Values of k of a stage."""
MOST_BUFFERS = 16
"""Stages that shared memory may hold: the shader has room for barriers of so many."""
WHOLE_FRAGMENTS = 3
"""Most fragments of which a loader brings a whole stage; of more, half of one."""
BARRIER_BYTES = 256
MOST_SIMDGROUPS_N = 8
"""Tiles of 32 columns side by side."""
MOST_SIMDGROUPS = 28
"""Warps of a block, loaders among them: they leave each 72 registers."""
CAPABILITY = (9, 0)
"""What has these products, and nothing newer (NVIDIA, PTX ISA, sm_90a)."""


def why_not(problem: Problem) -> str | None:
    """Says why the kernel cannot compute a problem; None if it can."""
    if problem.layout != "marlin":
        return f"wgmma reads packed weights, and layout is {problem.layout}"
    if problem.invariant:
        return "wgmma adds in another order than mma, which serves invariant products"
    return mma.why_not(problem)


def simdgroups(simdgroups_n: int, simdgroups_k: int) -> int:
    """Returns the warps of a block."""
    return WARPGROUP * -(-simdgroups_n // WARPGROUP) * simdgroups_k + LOADERS


def buffers_of(fragments_m: int, simdgroups_k: int) -> tuple[int, ...]:
    """Returns the stages that there may be.

    A stage's place is always the same loader's and the same slice's: barriers tell one
    turn from the next only. And a slice gives a stage back when it has begun with its
    next one.
    """
    pieces = 1 if fragments_m <= WHOLE_FRAGMENTS else 2
    step = lcm(LOADERS // pieces, simdgroups_k)
    return tuple(
        each for each in range(step, MOST_BUFFERS + 1, step) if each > simdgroups_k
    )


def stage_bytes(tile_m: int) -> int:
    """Returns the bytes of a stage of x."""
    return tile_m * STAGE_K * 2


def check(
    problem: Problem,
    *,
    fragments_m: int,
    simdgroups_m: int,
    simdgroups_n: int,
    simdgroups_k: int,
    buffers: int,
    loaders: int,
    tile_m: int,
    tile_n: int,
    subtract: bool,
) -> None:
    """Checks the fields of a plan.

    Raises:
        ValueError: If the kernel cannot have them.
    """
    reason = why_not(problem)
    if reason is not None:
        raise ValueError(f"kernel='wgmma': {reason}")
    if fragments_m not in FRAGMENTS_M:
        raise ValueError(f"fragments_m={fragments_m} is not one of {FRAGMENTS_M}")
    if simdgroups_m != 1 or subtract or loaders != LOADERS:
        raise ValueError(
            f"wgmma has simdgroups_m=1, subtract=False and loaders={LOADERS}, got "
            f"simdgroups_m={simdgroups_m}, subtract={subtract}, loaders={loaders}"
        )
    if not 1 <= simdgroups_n <= MOST_SIMDGROUPS_N or simdgroups_k < 1:
        raise ValueError(
            f"simdgroups_n={simdgroups_n} must be 1 to {MOST_SIMDGROUPS_N} and "
            f"simdgroups_k={simdgroups_k} at least 1"
        )
    if simdgroups(simdgroups_n, simdgroups_k) > MOST_SIMDGROUPS:
        raise ValueError(
            f"simdgroups_n={simdgroups_n} x simdgroups_k={simdgroups_k} make "
            f"{simdgroups(simdgroups_n, simdgroups_k)} simdgroups in a threadgroup, "
            f"expected at most {MOST_SIMDGROUPS}"
        )
    fitting = buffers_of(fragments_m, simdgroups_k)
    if buffers not in fitting:
        raise ValueError(
            f"buffers={buffers} is not one of {fitting} for fragments_m={fragments_m} "
            f"and simdgroups_k={simdgroups_k}: each stage is always the same loader's "
            f"and the same slice's"
        )
    sides = mma.FRAGMENT_ROWS * fragments_m, TILE_N * simdgroups_n
    if (tile_m, tile_n) != sides:
        raise ValueError(
            f"fragments_m={fragments_m} and simdgroups_n={simdgroups_n} make tiles of "
            f"{sides[0]}x{sides[1]}, got tile.m={tile_m}, tile.n={tile_n}"
        )
