"""The Metal kernels that a plan may name, and their limits."""

from mlx_marlin.planning.work.tiles import Kernel

KERNELS: tuple[Kernel, ...] = ("gemv", "gemm_register", "gemm_staged")

FRAGMENTS_M = (1, 2)
"""Row fragments of x a simdgroup may hold: with three, group sums spill registers."""
MAX_SIMDGROUPS = 8
"""256 threads, a size that leaves every kernel its registers."""
THREADGROUP_LIMIT = 32768
"""Bytes of threadgroup memory that one threadgroup may have."""
GEMV_ROWS = {"float16": 5, "bfloat16": 3, "float32": 3}
"""Most rows of `gemv`, by dtype: beyond, 4-byte values of x take too many registers."""
