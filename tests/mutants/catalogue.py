"""Every planted bug."""

import planted_batch
import planted_epilogue
import planted_formats
import planted_gather
import planted_gemm
import planted_gemv
import planted_lane
import planted_repack
import planted_staged
import planted_work

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
