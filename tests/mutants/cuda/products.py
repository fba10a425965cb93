"""Bugs in the CUDA kernel "mma": who holds what, borders, barriers and alignment."""

from mutants.mutant import Detector, Mutant

PACKED = "packed, two tiles side by side, three slices, whole k"
PACKED_STREAM = "packed, streams, four slices"
ORDER = "packed, numbers that cancel, three slices"
PACKED_ODD = "packed, odd offsets"
NATIVE = "native bfloat16, two tiles side by side, three slices, whole k"
TAIL = "packed groups of 32, k tail"
PAIRS = "packed groups of 128, slices"
SYMMETRIC = "packed symmetric codes, bfloat16"
ZERO_POINT = "packed zero points of 3 bits"
NVFP4 = "packed nvfp4"
PARTS = "packed, three results"
MXFP4 = "packed mxfp4, bfloat16"
ODD_X = "packed, odd offset of x"
ODD_WORDS = "packed, odd offset of words"
ODD_SCALES = "packed, odd offset of scales"

_SPLIT_OUTPUT = "cuda/split_output.cuh"
_LANE = "cuda/lane.cuh"
_MMA = "cuda/mma.cuh"
_MAIN_LOOP = "cuda/main_loop.cuh"
_TILE = "cuda/weight_tile.cuh"
_WEIGHTS = "cuda/weights.cuh"

MUTANTS = (
    Mutant(
        "cuda: partial sums are added in descending order",
        "lib/epilogue.metal",
        "slices",
        "[$1 * $2 * $3]",
        "[(k_slices - $1) * $2 * $3]",
        ORDER,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: two bits of a packed lane are swapped",
        _LANE,
        "packed_lane",
        "($1 >> 1) << 3 | ($2 & 3) << 1 | ($1 & 1)",
        "($1 & 1) << 3 | ($2 & 3) << 1 | ($1 >> 1)",
        PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: lower halves of x stand where upper ones belong",
        _LANE,
        "halves",
        "0x7632",
        "0x5410",
        NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: pairs of native 4-bit codes are those of the packed layout",
        _LANE,
        "distance",
        "!$1 && $2 == 4 ? 4 :",
        "",
        NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: sums of rows g and g + 8 change places",
        _LANE,
        "sums",
        "$1 >> 1",
        "1 - ($1 >> 1)",
        PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: odd x is read twice",
        _LANE,
        "odd_x",
        "+ 1",
        "",
        PACKED_ODD,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: a slice begins before the one above it ends",
        _MAIN_LOOP,
        "row",
        "$1 / $2",
        "$1 / ($2 + 1)",
        PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: the numbers of groups of 128 change every 64",
        _MAIN_LOOP,
        "group",
        "if ($1 % $2 == 0)",
        "",
        PAIRS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: a step beyond k is multiplied",
        _MAIN_LOOP,
        "last_step",
        "$1 + step * $2",
        "$1",
        TAIL,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: the next words come a tile too early",
        _MAIN_LOOP,
        "prefetch",
        "$1 *",
        "",
        PAIRS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: x is not looked at for alignment",
        _MMA,
        "aligned",
        "($1.x) && $2",
        "",
        ODD_X,
        Detector.MISALIGNED,
    ),
    Mutant(
        "cuda: words are not looked at for alignment",
        _TILE,
        "aligned",
        "$1($2.w) && $1",
        "$1",
        ODD_WORDS,
        Detector.MISALIGNED,
    ),
    Mutant(
        "cuda: scales are not looked at for alignment",
        _TILE,
        "aligned",
        "&& $1($2);",
        ";",
        ODD_SCALES,
        Detector.MISALIGNED,
    ),
    Mutant(
        "cuda: no barrier before the store",
        _MMA,
        "before_store",
        "__syncthreads();",
        "",
        PACKED,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "cuda: no barrier after the store",
        "lib/work.metal",
        "done",
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
        PACKED_STREAM,
        Detector.RACE,
    ),
    Mutant(
        "cuda: a block ends after its first split",
        "lib/work.metal",
        "done",
        "if ($1)",
        "if (true)",
        PACKED_STREAM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: the last block's warps all have columns",
        _TILE,
        "row_bound",
        "min($1 + $2 + 8 * $3, $4 - 1)",
        "($1 + $2 + 8 * $3)",
        NATIVE,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: codes under the exponent of 64 read as under that of 1024",
        _WEIGHTS,
        "exponent",
        ", 0x54005400u",
        ", 0x64006400u",
        PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: symmetric codes in bfloat16 keep their surplus",
        _WEIGHTS,
        "surplus",
        "+ $1 * 0x00010001u",
        "",
        SYMMETRIC,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: every plane of a packed tile has four words of a lane together",
        _TILE,
        "whole_chunks",
        "&& $1<$2>::$3 % 4 == 0",
        "",
        ZERO_POINT,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: numbers that come one by one change places",
        _TILE,
        "slot",
        "<< $1",
        "<< ($1 + 1)",
        PACKED_ODD,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: a zero point is added",
        _WEIGHTS,
        "zero_point",
        "== $1",
        "== $1 && W::BITS == 4",
        ZERO_POINT,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: lanes of nvfp4 share a scale",
        _TILE,
        "pair_scales",
        "$1 += $2 * ($3 * $4);",
        "",
        NVFP4,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: the first element of a part is written past the one before",
        _SPLIT_OUTPUT,
        "part",
        ">=",
        ">",
        PARTS,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: a part begins after as many elements as columns",
        _SPLIT_OUTPUT,
        "part",
        "= $1 *",
        "=",
        PARTS,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: parts change places",
        _SPLIT_OUTPUT,
        "part",
        "[$1]; $2",
        "[PARTS - $1]; $2",
        PARTS,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: small floats of bfloat16 products have no mantissa",
        _WEIGHTS,
        "four_bit_floats",
        "0x01C001C0u",
        "0x01800180u",
        MXFP4,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: small floats of bfloat16 products are half as large",
        _WEIGHTS,
        "four_bit_floats",
        "0x7E807E80u",
        "0x7E007E00u",
        MXFP4,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: rows past the end of x are read",
        _MAIN_LOOP,
        "row",
        "min($1 + 8 * $2 + $3, $4 - 1)",
        "($1 + 8 * $2 + $3)",
        PACKED,
        Detector.OUTSIDE,
    ),
)
