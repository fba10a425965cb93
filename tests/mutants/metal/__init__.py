"""Bugs planted in the Metal kernels."""

from mutants.metal import (
    batch,
    blocks,
    epilogue,
    expert_epilogue,
    formats,
    gather,
    gemm,
    gemv,
    lane,
    normed,
    repack,
    staged,
    super_blocks,
    tensor,
    work,
)

MUTANTS = (
    *work.MUTANTS,
    *epilogue.MUTANTS,
    *normed.MUTANTS,
    *lane.MUTANTS,
    *gemm.MUTANTS,
    *staged.MUTANTS,
    *tensor.MUTANTS,
    *gemv.MUTANTS,
    *formats.MUTANTS,
    *super_blocks.MUTANTS,
    *repack.MUTANTS,
    *expert_epilogue.MUTANTS,
    *gather.MUTANTS,
    *batch.MUTANTS,
    *blocks.MUTANTS,
)
