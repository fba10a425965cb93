"""Every planted bug, in Metal and in CUDA."""

from mutants import (
    planted_batch,
    planted_cuda,
    planted_cuda_gather,
    planted_cuda_mma_staged,
    planted_cuda_rows,
    planted_cuda_staged,
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

CUDA_MUTANTS = (
    *planted_cuda.MUTANTS,
    *planted_cuda_gather.MUTANTS,
    *planted_cuda_rows.MUTANTS,
    *planted_cuda_staged.MUTANTS,
    *planted_cuda_mma_staged.MUTANTS,
)
