"""Kernels of the CUDA back end, and their limits.

"mma" decodes a weight into fragments of 16x8x16 matrix products, with two float16 or
bfloat16 values per register. A tile is `simdgroups_n` packed tiles wide, each with
`simdgroups_k` warps; a warp has one contiguous slice of the tile's k.

The pipelined kernels stage x in shared memory: in "mma_staged" and "wgmma" four warps
fill `buffers` stages of 128 values of k, and all others multiply. "mma_staged" has the
products of "mma" and reads x from memory once per block instead of once per warp.
"wgmma" uses Hopper's warpgroup products of four warps.
"""

from math import lcm
from typing import NamedTuple

from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Kernel
from mlx_marlin.weights.formats import DTYPE_BYTES, TILE_N

OF_CUDA: tuple[Kernel, ...] = ("mma", "mma_staged", "wgmma")
"""Names of the CUDA kernels."""
FRAGMENT_ROWS = 8
"""Rows of x in a 16x8x16 product; the 16 are rows of the weight."""
FRAGMENTS_M = (1, 2, 3, 4)
"""Fragments of x that a warp may hold."""
MOST_SIMDGROUPS_N = 8
"""Most packed tiles of 32 columns side by side."""
MOST_SIMDGROUPS = 28
"""Most warps of a block, which leaves 72 registers per thread."""
SHARED_LIMIT = 227 * 1024
"""Largest shared memory of a block in bytes (NVIDIA, CUDA C++ Programming Guide,
compute capability 9.0). The search applies the limit of the device."""
NORMED_BYTES = 76 * 1024
"""Bytes of shared memory for the weight of an RMSNorm and the normalized rows: 8 of
4096 values. The sums of warps need memory too, and the rest caches scales (a guess).
The same for any number of rows, because MLX sets a kernel's shared memory only once."""
NORMED_PADDING = 16
"""Bytes of padding per normalized row: 8 rows are read together
(shaders/cuda/rows.cuh)."""
DTYPES = ("float16", "bfloat16")
"""Dtypes of activations that fragments hold without conversion."""


def why_not(problem: Problem) -> str | None:
    """Returns why the kernel cannot compute a problem; None if it can."""
    if problem.dtype not in DTYPES:
        return (
            f"our CUDA kernels multiply {' and '.join(DTYPES)}, and dtype is "
            f"{problem.dtype}"
        )
    if problem.format.has_codebook:
        return "our CUDA kernels read no codebooks, which MLX multiplies decoded"
    if problem.format.has_super_blocks:
        return "our CUDA kernels do not read K-quants, which MLX multiplies"
    if problem.scale_dtype not in (problem.dtype, "uint8"):
        return (
            f"our CUDA kernels take bytes as scales or the dtype of x, "
            f"{problem.dtype}, and not scales in {problem.scale_dtype}"
        )
    # A scaled integer is not exact in half; the sums of longer groups are scaled.
    if problem.group_size == 16 and problem.format.codes != "floating":
        return (
            f"our CUDA kernels have no groups of 16 integers, and mode is "
            f"{problem.mode}"
        )
    if problem.epilogue.gated and problem.n % (2 * TILE_N):
        return (
            f"gate and up need whole tiles of {TILE_N} columns each, and n is "
            f"{problem.n}"
        )
    rotation = problem.epilogue.rotation
    if rotation is not None and rotation.features % (2 * TILE_N):
        return (
            f"halves of a head need whole tiles of {TILE_N} columns, and heads have "
            f"{rotation.features} features"
        )
    if least_tiles(problem) > MOST_SIMDGROUPS_N:
        return (
            f"our CUDA kernels normalize heads of up to {MOST_SIMDGROUPS_N * TILE_N} "
            f"features, and these have {least_tiles(problem) * TILE_N}"
        )
    return _why_not_normed(problem)


def least_tiles(problem: Problem) -> int:
    """Returns the number of packed tiles of which a block's width is a multiple.

    Two tiles contain both columns of a pair; an RMSNorm of heads needs a whole head.
    """
    rotation = problem.epilogue.rotation
    if rotation is not None and rotation.norm is not None:
        return rotation.features // TILE_N
    return 2 if problem.epilogue.is_paired else 1


def normed_bytes(problem: Problem) -> int:
    """Returns the bytes of a block's shared memory that an RMSNorm needs."""
    return 0 if problem.norm is None else NORMED_BYTES


def _why_not_normed(problem: Problem) -> str | None:
    if problem.norm is None:
        return None
    row = problem.k * DTYPE_BYTES[problem.dtype] + NORMED_PADDING
    if problem.m > FRAGMENT_ROWS or (problem.m + 1) * row > NORMED_BYTES:
        return (
            f"our CUDA kernels normalize up to {FRAGMENT_ROWS} rows in "
            f"{NORMED_BYTES} bytes, and there are {problem.m} of {problem.k}"
        )
    if problem.invariant:
        return "our CUDA kernels normalize no rows with invariant=True"
    return None


class Pipelined(NamedTuple):
    """Limits of one kernel."""

    fragments_m: tuple[int, ...]
    """Supported numbers of 8-row fragments of x in a tile."""
    together: int
    """Warps of one matrix product, each with its own packed tile."""
    most_simdgroups: int
    """Most warps of a block, including loaders."""


PIPELINED = {
    # 32 warps leave 64 registers per thread, 28 leave 72.
    "mma_staged": Pipelined(fragments_m=(1, 2, 3, 4), together=1, most_simdgroups=32),
    # A warpgroup has four warps (NVIDIA, PTX ISA, wgmma).
    "wgmma": Pipelined(fragments_m=(2, 3, 4, 6, 8), together=4, most_simdgroups=28),
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
PIPELINED_CAPABILITY = (9, 0)
"""Required compute capability: it has these barriers and products, and newer ones have
no wgmma (NVIDIA, PTX ISA, sm_90a). "mma_staged" was run on no other."""


def why_not_pipelined(problem: Problem) -> str | None:
    """Returns why the kernels cannot compute a problem; None if they can."""
    if problem.layout != "marlin":
        return (
            f"kernels with stages of x read packed weights, and layout is "
            f"{problem.layout}"
        )
    if problem.invariant:
        return "stages are added in another order than mma's, which serves all rows"
    return why_not(problem)


def warp_columns(kernel: str, simdgroups_n: int) -> int:
    """Returns the number of warps side by side, rounded up to whole products."""
    together = PIPELINED[kernel].together
    return together * -(-simdgroups_n // together)


def simdgroups(kernel: str, simdgroups_n: int, simdgroups_k: int) -> int:
    """Returns the number of warps of a block, including loaders."""
    return warp_columns(kernel, simdgroups_n) * simdgroups_k + LOADERS


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
    size = stage_bytes(FRAGMENT_ROWS * fragments_m)
    supported = buffers_of(fragments_m, warps_k)
    return [count for count in supported if count * size <= MOST_BUFFER_BYTES]


def buffers(fragments_m: int, warps_k: int) -> int:
    """Returns the largest worthwhile number of stages, else the smallest supported."""
    size = stage_bytes(FRAGMENT_ROWS * fragments_m)
    supported = buffers_of(fragments_m, warps_k)
    worth = (count for count in supported if count * size <= WORTHWHILE_BYTES)
    least = next(iter(supported), 0)  # 0: the plan reports the error
    return max((count for count in worth if count <= WORTHWHILE_BUFFERS), default=least)
