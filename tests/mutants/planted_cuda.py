"""Bugs in the CUDA kernels: who holds what, borders, barriers and alignment.

Their files are named with suffixes: `test_cuda_mutants.py` plants them.
"""

from mutant import Detector, Mutant

PACKED = "packed, two tiles side by side, three slices, whole k"
PACKED_STREAM = "packed, streams, four slices"
PACKED_ODD = "packed, odd offsets"
NATIVE = "native bfloat16, two tiles side by side, three slices, whole k"
TAIL = "packed groups of 32, k tail"
PAIRS = "packed groups of 128, slices"
SYMMETRIC = "packed symmetric codes, bfloat16"
ZERO_POINT = "packed zero points of 3 bits"
NVFP4 = "packed nvfp4"
PARTS = "packed, three results"
MXFP4 = "packed mxfp4, bfloat16"
GATED = "packed, gate and up, two slices"
ROTATED = "packed, rotated heads, two slices"
ROTATED_FAR = "packed, rotated heads at places of a million"
BATCH = "packed batch, streams"
ROWS_DECODED = "nvfp4 with a global scale, rows decoded in blocks"
K_DECODED = "nvfp4 with a global scale, k decoded in blocks"
NATIVE_DECODED = "native bfloat16, decoded in blocks of k"
ODD_X = "packed, odd offset of x"
ODD_WORDS = "packed, odd offset of words"
ODD_SCALES = "packed, odd offset of scales"

_LANE, _MMA, _WEIGHTS = "cuda/lane.cuh", "cuda/mma.cuh", "cuda/weights.cuh"
_TILE, _GATED = "cuda/weight_tile.cuh", "cuda/gated.cuh"
_ROTATED, _PAIRS = "cuda/rotated.cuh", "cuda/pairs.cuh"
_APART = "cuda/apart.cuh"
_DECODE, _SUMS = "cuda/decode.cuh", "cuda/sums.cuh"
_BEFORE_STORE = "    __syncthreads();\n    store_tile"
_BREAK = "    if (WHOLE) {\n      break;\n    }\n"
_ALIGNED = "is_aligned(rows.x) && is_aligned(w) && is_aligned(scales)"

MUTANTS = (
    Mutant(
        "cuda: two bits of a packed lane are swapped",
        _LANE,
        "(lane.pair >> 1) << 3 | (lane.row & 3) << 1 | (lane.pair & 1)",
        "(lane.pair & 1) << 3 | (lane.row & 3) << 1 | (lane.pair >> 1)",
        PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: lower halves of x stand where upper ones belong",
        _LANE,
        "0x7632);",
        "0x5410);",
        NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: pairs of native 4-bit codes are those of the packed layout",
        _LANE,
        "!W::PACKED && W::BITS == 4 ? 4 : W::PAIRS",
        "W::PAIRS",
        NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: sums of rows g and g + 8 change places",
        _LANE,
        "8 * (i >> 1)",
        "8 * (1 - (i >> 1))",
        PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: odd x is read twice",
        _LANE,
        "uint(values[2 * i + 1]) << 16",
        "uint(values[2 * i]) << 16",
        PACKED_ODD,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: a slice begins before the one above it ends",
        _MMA,
        "split.k_tile_count * slice / SLICES",
        "split.k_tile_count * slice / (SLICES + 1)",
        PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: the numbers of groups of 128 change every 64",
        _MMA,
        "if (nth % GROUP_TILES == 0) {",
        "{",
        PAIRS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: a step beyond k is multiplied",
        _MMA,
        "here + step * W::STEP < k_stop) {\n          multiply_step",
        "here < k_stop) {\n          multiply_step",
        TAIL,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: the next words come a tile too early",
        _MMA,
        "load_tile<W, ALIGNED>(words[nth % AHEAD], tile, here + AHEAD * TILE_K",
        "load_tile<W, ALIGNED>(words[nth % AHEAD], tile, here + TILE_K",
        PAIRS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: x is not looked at for alignment",
        _MMA,
        _ALIGNED,
        "is_aligned(w) && is_aligned(scales)",
        ODD_X,
        Detector.MISALIGNED,
    ),
    Mutant(
        "cuda: words are not looked at for alignment",
        _MMA,
        _ALIGNED,
        "is_aligned(rows.x) && is_aligned(scales)",
        ODD_WORDS,
        Detector.MISALIGNED,
    ),
    Mutant(
        "cuda: scales are not looked at for alignment",
        _MMA,
        _ALIGNED,
        "is_aligned(rows.x) && is_aligned(w)",
        ODD_SCALES,
        Detector.MISALIGNED,
    ),
    Mutant(
        "cuda: no barrier before the store",
        _MMA,
        _BEFORE_STORE,
        "    store_tile",
        PACKED,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "cuda: no barrier after the store",
        _MMA,
        f"{_BREAK}    __syncthreads();\n",
        _BREAK,
        PACKED_STREAM,
        Detector.RACE,
    ),
    Mutant(
        "cuda: the last block's warps all have columns",
        _TILE,
        "min(col + lane.row + 8 * f, work.n - 1)",
        "(col + lane.row + 8 * f)",
        NATIVE,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: codes under the exponent of 64 read as under that of 1024",
        _WEIGHTS,
        "masked(shifted, 0x00F000F0u, 0x54005400u)",
        "masked(shifted, 0x00F000F0u, 0x64006400u)",
        PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: symmetric codes in bfloat16 keep their surplus",
        _WEIGHTS,
        "0x43004300u + SURPLUS * 0x00010001u",
        "0x43004300u",
        SYMMETRIC,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: every plane of a packed tile has four words of a lane together",
        _TILE,
        "Planes<W>::LOW_WORDS >= 4 && Planes<W>::HIGH_WORDS % 4 == 0",
        "Planes<W>::LOW_WORDS >= 4",
        ZERO_POINT,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: numbers that come one by one change places",
        _TILE,
        "bits << i % EACH",
        "bits << (i + 1) % EACH",
        PACKED_ODD,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: a zero point is added",
        _WEIGHTS,
        "if (W::MODE == ZERO_POINT) {",
        "if (W::MODE == ZERO_POINT && W::BITS == 4) {",
        ZERO_POINT,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: lanes of nvfp4 share a scale",
        _TILE,
        "tile.scales += lane.pair * (FACTORS * TILE_N);",
        "",
        NVFP4,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: the first element of a part is written past the one before",
        _APART,
        "place >= uint(",
        "place > uint(",
        PARTS,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: a part begins after as many elements as columns",
        _APART,
        "begin = rows * first[i]",
        "begin = first[i]",
        PARTS,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: parts change places",
        _APART,
        "array = arrays[i];",
        "array = arrays[PARTS - i];",
        PARTS,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: small floats of bfloat16 products have no mantissa",
        _WEIGHTS,
        "0x01C001C0u",
        "0x01800180u",
        MXFP4,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: small floats of bfloat16 products are half as large",
        _WEIGHTS,
        "0x7E807E80u",
        "0x7E007E00u",
        MXFP4,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: up is what gates",
        _GATED,
        "activate<ACTIVATION>(gate) * up",
        "activate<ACTIVATION>(up) * gate",
        GATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: up's tiles are those beside gate's",
        _PAIRS,
        "column / PAIRS * HOW::distance_of_pair(work.n)",
        "column / PAIRS * PAIRS * TILE_N",
        GATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: gate and up store past the end of a row",
        _PAIRS,
        "if (row >= rows || pair >= work.n / 2) {",
        "if (row >= rows) {",
        GATED,
        Detector.UNWRITTEN,
    ),
    Mutant(
        "cuda: a row of gate and up is as long as both",
        _GATED,
        "row * (work.n / 2) + pair",
        "row * work.n + pair",
        GATED,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: of gate and up the first slice alone counts",
        _PAIRS,
        "for (int slice = 1; slice < slices; ++slice) {",
        "for (int slice = 1; slice < 1; ++slice) {",
        GATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: heads are turned the other way",
        _ROTATED,
        "x * cosine - point.y * sine, point.x * sine +",
        "x * cosine + point.y * sine, point.y * cosine - point.x * sine + 0 *",
        ROTATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: all rows have the first one's place",
        _ROTATED,
        "places[EACH ? row : 0]",
        "places[0]",
        ROTATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: heads of v are rotated too",
        _ROTATED,
        "if (col < ROTATED) {",
        "if (col < work.n) {",
        ROTATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: a turn is a float",
        _ROTATED,
        "angle = fmaf(turns, 1.7484556e-7f, angle);",
        "",
        ROTATED_FAR,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: heads are one, as wide as all",
        _ROTATED,
        "pair / HALF * FEATURES + pair % HALF",
        "pair",
        ROTATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: both halves of a head have the first one's bias",
        _ROTATED,
        "place + HALF, col + HALF)",
        "place + HALF, col)",
        ROTATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: heads store past the end of a row",
        _PAIRS,
        "if (row >= rows || pair >= work.n / 2) {",
        "if (row >= rows) {",
        ROTATED,
        Detector.UNWRITTEN,
    ),
    Mutant(
        "cuda: the reduce sees tiles of one width only",
        "lib/reduce.metal",
        "col / WIDTH",
        "col",
        PACKED_STREAM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: rows past the end of x are read",
        _MMA,
        "min(split.row + 8 * i + tile.lane.row, work.m - 1)",
        "(split.row + 8 * i + tile.lane.row)",
        PACKED,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: threads of the reduce's last block have a product of their own",
        _SUMS,
        "index < work.batch *",
        "index < (work.batch + 1) *",
        BATCH,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: the reduce finishes the first product only",
        _SUMS,
        "index < work.batch *",
        "index <",
        BATCH,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: warps of decoding's last block have rows",
        _DECODE,
        "if (tile_row >= rows) {",
        "if (tile_row >= work.n) {",
        ROWS_DECODED,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: decoding stores a row too many",
        _DECODE,
        "if (inside < rows) {",
        "if (inside <= rows) {",
        ROWS_DECODED,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: every block of decoded rows is the first",
        _DECODE,
        "biases, row + tile_row, work",
        "biases, tile_row, work",
        ROWS_DECODED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: words of every decoded block of k are the first",
        _DECODE,
        "(words, tile, first_k + k, work)",
        "(words, tile, k, work)",
        K_DECODED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: scales of every decoded block of k are the first",
        _DECODE,
        "(tile, first_k + k, work)",
        "(tile, k, work)",
        K_DECODED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: every other decoded weight has no global scale",
        _DECODE,
        "T(float(pair.y) * weight_scale) : pair.y",
        "pair.y : pair.y",
        K_DECODED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: lanes decode over each other",
        _DECODE,
        "k + W::CODES * lane.pair",
        "k + lane.pair",
        NATIVE_DECODED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: pairs of native decoded codes are neighbours",
        _DECODE,
        "first_of_pair<W>(p) + Run<W>::DISTANCE]",
        "first_of_pair<W>(p) + 1]",
        NATIVE_DECODED,
        Detector.WRONG_RESULT,
    ),
)
