"""Kernels of the Metal back end and their limits."""

from mlx_marlin.planning.work.tiles import Kernel

KERNELS: tuple[Kernel, ...] = ("gemv", "gemm_register", "gemm_staged")

FRAGMENTS_M = (1, 2)
"""Row fragments of x that a simdgroup may hold; with three, group sums would spill."""
MAX_SIMDGROUPS = 8
"""Simdgroups of a threadgroup: with 256 threads no kernel is short of registers."""
THREADGROUP_LIMIT = 32768
"""Bytes of threadgroup memory that a threadgroup may use."""
GEMV_ROWS = {"float16": 5, "bfloat16": 3, "float32": 3}
"""Most rows of `gemv`, by dtype; more 4-byte values of x need too many registers."""
