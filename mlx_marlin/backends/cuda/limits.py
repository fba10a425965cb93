"""Kernels of the CUDA back end, and the limits of "mma".

"mma" decodes a weight into fragments of 16x8x16 matrix products, with two float16 or
bfloat16 values per register. A tile is `simdgroups_n` packed tiles wide, each with
`simdgroups_k` warps; a warp has one contiguous slice of the tile's k.
"""

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
