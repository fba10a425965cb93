"""CUDA kernels whose x waits in shared memory: what they compute, how plans look.

In "mma_staged" and "wgmma", four warps fill stages of x and all others multiply. A tile
has `simdgroups_n` packed tiles side by side, each `simdgroups_k` warps, and `buffers`
stages of 128 values of k. "mma_staged" has the products of "mma", and reads x from
memory once a block instead of once a warp; in "wgmma", Hopper's matrix products, four
warps go together.
"""

from math import lcm
from typing import NamedTuple

from mlx_marlin.backends.cuda import limits
from mlx_marlin.planning.problem import Problem


class Traits(NamedTuple):
    """Where the two differ."""

    fragments_m: tuple[int, ...]
    """Fragments of 8 rows of x in a tile."""
    together: int
    """Warps that multiply together, each its own packed tile."""
    most_simdgroups: int
    """Warps of a block, loaders among them."""


KERNELS = {
    # 32 warps leave each 64 registers, 28 leave 72.
    "mma_staged": Traits(fragments_m=(1, 2, 3, 4), together=1, most_simdgroups=32),
    # A warpgroup is four warps (NVIDIA, PTX ISA, wgmma).
    "wgmma": Traits(fragments_m=(2, 3, 4, 6, 8), together=4, most_simdgroups=28),
}
LOADERS = 4
"""Warps that fill stages."""
STAGE_K = 128
"""Values of k of a stage."""
MOST_BUFFERS = 32
"""Stages that shared memory may hold: the shader has room for barriers of so many."""
WORTHWHILE_BYTES, WORTHWHILE_BUFFERS = 96 * 1024, 12
"""What stages of x may take, and how many there are: 12 of up to 32 rows, 8 of 48, 6 of
64 (measured: more were no faster, docs/lab), and more only where slices of k need
them."""
MOST_BUFFER_BYTES = 128 * 1024
"""What these may take: the sums of a block's warps and other blocks want room too."""
WHOLE_FRAGMENTS = 3
"""Most fragments of which a loader brings a whole stage; of more, half of one."""
BARRIER_BYTES = 512
CAPABILITY = (9, 0)
"""What has these barriers and products, and nothing newer, which has no wgmma (NVIDIA,
PTX ISA, sm_90a); "mma_staged" ran nowhere else."""


def why_not(problem: Problem) -> str | None:
    """Says why the kernels cannot compute a problem; None if they can."""
    if problem.layout != "marlin":
        return (
            f"kernels with stages of x read packed weights, and layout is "
            f"{problem.layout}"
        )
    if problem.invariant:
        return "stages are added in another order than mma's, which serves all rows"
    return limits.why_not(problem)


def columns(kernel: str, simdgroups_n: int) -> int:
    """Returns the warps side by side, those without a packed tile among them."""
    together = KERNELS[kernel].together
    return together * -(-simdgroups_n // together)


def simdgroups(kernel: str, simdgroups_n: int, simdgroups_k: int) -> int:
    """Returns the warps of a block."""
    return columns(kernel, simdgroups_n) * simdgroups_k + LOADERS


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
    kernel: str,
    fragments_m: int,
    simdgroups_n: int,
    simdgroups_k: int,
    buffers: int,
    loaders: int,
    tile_m: int,
    tile_n: int,
) -> None:
    """Checks the fields of a plan.

    Raises:
        ValueError: If the kernel cannot have them.
    """
    reason = why_not(problem)
    if reason is not None:
        raise ValueError(f"kernel={kernel!r}: {reason}")
    known = KERNELS[kernel].fragments_m
    if fragments_m not in known:
        raise ValueError(f"fragments_m={fragments_m} is not one of {known}")
    if loaders != LOADERS:
        raise ValueError(f"{kernel} has loaders={LOADERS}, got loaders={loaders}")
    limits.check_counts(simdgroups_n, simdgroups_k)
    warps = simdgroups(kernel, simdgroups_n, simdgroups_k)
    most = KERNELS[kernel].most_simdgroups
    if warps > most:
        raise ValueError(
            f"simdgroups_n={simdgroups_n} x simdgroups_k={simdgroups_k} make {warps} "
            f"simdgroups in a threadgroup, expected at most {most}"
        )
    fitting = buffers_of(fragments_m, simdgroups_k)
    if buffers not in fitting:
        raise ValueError(
            f"buffers={buffers} is not one of {fitting} for fragments_m={fragments_m} "
            f"and simdgroups_k={simdgroups_k}: each stage is always the same loader's "
            f"and the same slice's"
        )
    limits.check_sides(fragments_m, simdgroups_n, tile_m, tile_n)


def affordable_buffers(fragments_m: int, warps_k: int) -> list[int]:
    """Returns how many stages of x slices of k may have, as far as there is memory."""
    each = stage_bytes(limits.FRAGMENT_ROWS * fragments_m)
    fitting = buffers_of(fragments_m, warps_k)
    return [count for count in fitting if count * each <= MOST_BUFFER_BYTES]


def buffers(fragments_m: int, warps_k: int) -> int:
    """Returns the stages: as many as may be and are worth their memory."""
    each = stage_bytes(limits.FRAGMENT_ROWS * fragments_m)
    fitting = buffers_of(fragments_m, warps_k)
    worth = (count for count in fitting if count * each <= WORTHWHILE_BYTES)
    least = next(iter(fitting), 0)  # none: the plan says why
    return max((count for count in worth if count <= WORTHWHILE_BUFFERS), default=least)
