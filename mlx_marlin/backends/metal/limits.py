"""The kernels that a plan may name: sizes that they are made of, and their limits."""

from typing import Literal

from mlx_marlin.weights.formats import TILE_K, TILE_N

Kernel = Literal["gemv", "gemm_register", "gemm_staged", "mma", "mma_staged", "wgmma"]
Reduction = Literal["none", "workspace", "atomic"]

OF_CUDA: tuple[Kernel, ...] = ("mma", "mma_staged", "wgmma")
"""Those that run on CUDA devices; the others are Metal's."""
KERNELS: tuple[Kernel, ...] = ("gemv", "gemm_register", "gemm_staged", *OF_CUDA)
REDUCTIONS: tuple[Reduction, ...] = ("none", "workspace", "atomic")

FRAGMENT = 8
"""Rows and columns of a simdgroup matrix."""
SIMD_WIDTH = 32
"""Threads of a simdgroup."""
FRAGMENTS_M = (1, 2)
"""Row fragments of x a simdgroup may hold: with three, group sums spill registers."""
MAX_SIMDGROUPS = 8
"""256 threads, a size that leaves every kernel its registers."""
THREADGROUP_LIMIT = 32768
"""Bytes of threadgroup memory that one threadgroup may have."""
PADDED_COLUMNS = TILE_N + 4
"""Columns of a float32 row of the epilogue's scratch: the 4 spread rows over banks."""
GEMV_ROWS = {"float16": 5, "bfloat16": 3, "float32": 3}
"""Most rows of `gemv`, by dtype: beyond, 4-byte values of x take too many registers."""


def k_tile(group_size: int) -> int:
    """Returns the weights of a k tile, between which k may be cut.

    Every trip applies its own group's scales, so a cut may fall inside a group: longer
    groups than 128, and whole rows, are cut as finely as short ones.
    """
    return 128 if group_size == 128 else TILE_K


def step_k(group_size: int) -> int:
    """Returns the k of a step: a fragment of a step must not sit in two groups."""
    return 32 if group_size == 32 else TILE_K
