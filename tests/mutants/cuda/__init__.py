"""Bugs planted in the CUDA kernels.

The files of these mutants have suffixes: `test_cuda_mutants.py` plants them.
"""

from mutants.cuda import (
    decode,
    gather,
    mma_staged,
    pairs,
    products,
    rotated,
    rows,
    staged,
)

MUTANTS = (
    *products.MUTANTS,
    *pairs.MUTANTS,
    *rotated.MUTANTS,
    *decode.MUTANTS,
    *gather.MUTANTS,
    *rows.MUTANTS,
    *staged.MUTANTS,
    *mma_staged.MUTANTS,
)
