"""Bugs in the CUDA kernels that decode weights and add splits."""

from mutants.cuda.products import PACKED_STREAM
from mutants.mutant import Detector, Mutant

BATCH = "packed batch, streams"
ROWS_DECODED = "nvfp4 with a global scale, rows decoded in blocks"
K_DECODED = "nvfp4 with a global scale, k decoded in blocks"
NATIVE_DECODED = "native bfloat16, decoded in blocks of k"

_SUMS = "cuda/reduce_decls.cuh"
_DECODE = "cuda/decode.cuh"

MUTANTS = (
    Mutant(
        "cuda: the reduce sees tiles of one width only",
        "lib/reduce.metal",
        "reduce",
        "/ $1",
        "",
        PACKED_STREAM,
        Detector.WRONG_RESULT,
        nth=(3, 3),
    ),
    Mutant(
        "cuda: threads of the reduce's last block have a product of their own",
        _SUMS,
        "is_thread_of_reduce",
        "$1 *",
        "($1 + 1) *",
        BATCH,
        Detector.OUTSIDE,
        nth=(3, 3),
    ),
    Mutant(
        "cuda: the reduce finishes the first product only",
        _SUMS,
        "is_thread_of_reduce",
        "$1 *",
        "",
        BATCH,
        Detector.WRONG_RESULT,
        nth=(3, 3),
    ),
    Mutant(
        "cuda: warps of decoding's last block have rows",
        _DECODE,
        "",
        ">= $1",
        ">= work.n",
        ROWS_DECODED,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: decoding stores a row too many",
        _DECODE,
        "",
        "($1 < $2)",
        "($1 <= $2)",
        ROWS_DECODED,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: every block of decoded rows is the first",
        _DECODE,
        "dequantize",
        "$1 +",
        "",
        ROWS_DECODED,
        Detector.WRONG_RESULT,
        nth=(1, 8),
    ),
    Mutant(
        "cuda: words of every decoded block of k are the first",
        _DECODE,
        "dequantize",
        "$1 +",
        "",
        K_DECODED,
        Detector.WRONG_RESULT,
        nth=(2, 8),
    ),
    Mutant(
        "cuda: scales of every decoded block of k are the first",
        _DECODE,
        "dequantize",
        ", $1 +",
        ",",
        K_DECODED,
        Detector.WRONG_RESULT,
        nth=(3, 3),
    ),
    Mutant(
        "cuda: every other decoded weight has no global scale",
        _DECODE,
        "",
        "$1(float($2.y) * $3)",
        "$2.y",
        K_DECODED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: lanes decode over each other",
        _DECODE,
        "",
        "+ $1 *",
        "+",
        NATIVE_DECODED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: pairs of native decoded codes are neighbours",
        _DECODE,
        "",
        "$1<$2>::$3",
        "1",
        NATIVE_DECODED,
        Detector.WRONG_RESULT,
    ),
)
