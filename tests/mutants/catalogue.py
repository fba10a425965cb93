"""Every planted bug."""

from mutants import (
    planted_batch,
    planted_epilogue,
    planted_formats,
    planted_gather,
    planted_gemm,
    planted_gemv,
    planted_lane,
    planted_repack,
    planted_staged,
    planted_work,
)

MUTANTS = (
    *planted_work.MUTANTS,
    *planted_epilogue.MUTANTS,
    *planted_lane.MUTANTS,
    *planted_gemm.MUTANTS,
    *planted_staged.MUTANTS,
    *planted_gemv.MUTANTS,
    *planted_formats.MUTANTS,
    *planted_repack.MUTANTS,
    *planted_gather.MUTANTS,
    *planted_batch.MUTANTS,
)
