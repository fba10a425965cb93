"""Limits of the pipelined CUDA kernels, which stage x in shared memory.

In "mma_staged" and "wgmma" four warps fill stages of x and all others multiply. A tile
has `simdgroups_n` packed tiles side by side, each with `simdgroups_k` warps, and
`buffers` stages of 128 values of k. "mma_staged" has the products of "mma" and reads x
from memory once per block instead of once per warp. "wgmma" uses Hopper's warpgroup
products of four warps.
"""

from math import lcm
from typing import NamedTuple

from mlx_marlin.backends.cuda import limits
from mlx_marlin.planning.problem import Problem


class Traits(NamedTuple):
    """Limits of one kernel."""

    fragments_m: tuple[int, ...]
    """Supported numbers of 8-row fragments of x in a tile."""
    together: int
    """Warps of one matrix product, each with its own packed tile."""
    most_simdgroups: int
    """Most warps of a block, including loaders."""


KERNELS = {
    # 32 warps leave 64 registers per thread, 28 leave 72.
    "mma_staged": Traits(fragments_m=(1, 2, 3, 4), together=1, most_simdgroups=32),
    # A warpgroup has four warps (NVIDIA, PTX ISA, wgmma).
    "wgmma": Traits(fragments_m=(2, 3, 4, 6, 8), together=4, most_simdgroups=28),
}
LOADERS = 4
"""Warps that fill stages."""
STAGE_K = 128
"""K values of a stage."""
MOST_BUFFERS = 32
"""Most stages: the shader has barriers for as many."""
WORTHWHILE_BYTES, WORTHWHILE_BUFFERS = 96 * 1024, 12
"""Limits of the stages of x, in bytes and in number: 12 stages of up to 32 rows, 8 of
48, 6 of 64. More were not faster (measured, docs/lab) and are used only if the slices
of k need them."""
MOST_BUFFER_BYTES = 128 * 1024
"""Most bytes of stages if the slices of k need more of them. The sums of a block's
warps and other blocks need shared memory too."""
WHOLE_FRAGMENTS = 3
"""Most fragments for which a loader fills a whole stage; with more, half of one."""
BARRIER_BYTES = 512
"""Bytes of shared memory for barriers."""
CAPABILITY = (9, 0)
"""Required compute capability: it has these barriers and products, and newer ones have
no wgmma (NVIDIA, PTX ISA, sm_90a). "mma_staged" was run on no other."""


def why_not(problem: Problem) -> str | None:
    """Returns why the kernels cannot compute a problem; None if they can."""
    if problem.layout != "marlin":
        return (
            f"kernels with stages of x read packed weights, and layout is "
            f"{problem.layout}"
        )
    if problem.invariant:
        return "stages are added in another order than mma's, which serves all rows"
    return limits.why_not(problem)


def columns(kernel: str, simdgroups_n: int) -> int:
    """Returns the number of warps side by side, rounded up to whole products."""
    together = KERNELS[kernel].together
    return together * -(-simdgroups_n // together)


def simdgroups(kernel: str, simdgroups_n: int, simdgroups_k: int) -> int:
    """Returns the number of warps of a block, including loaders."""
    return columns(kernel, simdgroups_n) * simdgroups_k + LOADERS


def buffers_of(fragments_m: int, simdgroups_k: int) -> tuple[int, ...]:
    """Returns the supported numbers of stages.

    A buffer always belongs to the same loader and the same slice of k, because a
    barrier's phase bit distinguishes only consecutive uses. A slice releases a stage
    after it has started with the next one, so it needs more than one.
    """
    pieces = 1 if fragments_m <= WHOLE_FRAGMENTS else 2
    step = lcm(LOADERS // pieces, simdgroups_k)
    counts = range(step, MOST_BUFFERS + 1, step)
    return tuple(count for count in counts if count > simdgroups_k)


def stage_bytes(tile_m: int) -> int:
    """Returns the bytes of a stage of x."""
    return tile_m * STAGE_K * 2


def affordable_buffers(fragments_m: int, warps_k: int) -> list[int]:
    """Returns the supported numbers of stages that fit into `MOST_BUFFER_BYTES`."""
    size = stage_bytes(limits.FRAGMENT_ROWS * fragments_m)
    supported = buffers_of(fragments_m, warps_k)
    return [count for count in supported if count * size <= MOST_BUFFER_BYTES]


def buffers(fragments_m: int, warps_k: int) -> int:
    """Returns the largest worthwhile number of stages, else the smallest supported."""
    size = stage_bytes(limits.FRAGMENT_ROWS * fragments_m)
    supported = buffers_of(fragments_m, warps_k)
    worth = (count for count in supported if count * size <= WORTHWHILE_BYTES)
    least = next(iter(supported), 0)  # 0: the plan reports the error
    return max((count for count in worth if count <= WORTHWHILE_BUFFERS), default=least)
