"""Every planted bug, in Metal and in CUDA."""

from mutants import cuda, metal

MUTANTS = metal.MUTANTS
CUDA_MUTANTS = cuda.MUTANTS
