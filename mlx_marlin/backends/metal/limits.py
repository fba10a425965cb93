"""Kernels of the Metal back end and their limits."""

from mlx_marlin.planning.work.tiles import Kernel

TENSOR_KERNEL: Kernel = "gemm_tensor"
"""The kernel with tensor operations."""
KERNELS: tuple[Kernel, ...] = ("gemv", "gemm_register", "gemm_staged", TENSOR_KERNEL)

FRAGMENTS_M = (1, 2)
"""Row fragments of x that a simdgroup holds in plans that the model chooses."""
THREE_FRAGMENTS_M = 3
"""Row fragments of `gemm_register` that only a race tries: one tile of 17 to 24 rows. A
Mac has to show whether fewer slots outweigh half as many simdgroups."""
TENSOR_FRAGMENTS_M = (2, 4)
"""The same of `gemm_tensor`: one operation of 16 rows of x, or two that share decoded
weights."""
OPERATION_FRAGMENTS = min(TENSOR_FRAGMENTS_M)
"""Row fragments of x of a tensor operation."""
TENSOR_ROUND_ROWS = 8
"""Rows of a simdgroup of `gemm_tensor` whose sums are in scratch at a time."""
MAX_SIMDGROUPS = 8
"""Simdgroups of a threadgroup: with 256 threads no kernel is short of registers."""
MAX_SIMDGROUPS_M = 4
"""Most simdgroups along m: tiles of up to 64 rows, which leave room for two along k."""
THREADGROUP_LIMIT = 32768
"""Bytes of threadgroup memory that a threadgroup may use."""
GEMV_ROWS = {"float16": 5, "bfloat16": 4, "float32": 3}
"""Most rows of `gemv`, by dtype; more 4-byte values of x need too many registers."""
NORM_ROWS = 2
"""Most rows of an RMSNorm before `gemv`: at 4 rows its registers spill (counted)."""
