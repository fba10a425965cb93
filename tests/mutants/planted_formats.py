"""Bugs in where codes of any width lie, and in weights as plain numbers."""

from mutants.cases import (
    DENSE,
    DENSE_BACK,
    EIGHT_NATIVE,
    FIVE_NATIVE,
    GEMM_NATIVE,
    GLOBAL,
    GLOBAL_DENSE,
    GLOBAL_GEMV,
    LONG_GROUPS,
    MXFP4,
    NVFP4,
    ONE_PACKED,
    SIXTEENS,
    SYMMETRIC,
    THREE_NATIVE,
    THREE_PACKED,
    WHOLE_ROWS,
)
from mutants.mutant import Detector, Mutant

_DECODE = "lib/decode"
_DENSE = "lib/dequantize"
_GEMM = "lib/gemm_register"
_GEMV = "lib/gemv"
_LANE = "lib/lane"
_WORDS = "lib/words"
_PAIR_AT = "pair_at(thread const uint* words, int f, int t, int place) {\n"

_PLANES = (
    Mutant(
        "the high plane is read where the low one is",
        _LANE,
        "first + TILE_N * TILE_K / 32 * LOW + step",
        "first + step",
        THREE_PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the planes change places",
        _WORDS,
        "W::BITS == 3 ? 2 :",
        "W::BITS == 3 ? 1 :",
        THREE_PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the high plane is loaded over the low one",
        _LANE,
        "words + Planes<W>::LOW_WORDS,",
        "words,",
        SYMMETRIC,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the high plane's bits are moved by its own width",
        _WORDS,
        "f, t, place + LOW)",
        "f, t, place + HIGH)",
        SYMMETRIC,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows that share a word are all the first one",
        _WORDS,
        "f % SHARING * PAIRS + t",
        "t",
        ONE_PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a pair's upper code keeps a bit of its neighbour",
        _WORDS,
        "both_halves(ones(BITS) << place)",
        "both_halves(ones(BITS + 1) << place)",
        THREE_PACKED,
        Detector.WRONG_RESULT,
    ),
)

_NATIVE = (
    Mutant(
        "a pair that crosses a window loses its upper bits",
        _WORDS,
        "if (inside + W::BITS <= 16) {",
        "if (inside + W::BITS <= 32) {",
        FIVE_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a pair's upper bits are those of its own window",
        _WORDS,
        "moved(windows[i + 1], 0, place + 16 - inside)",
        "moved(windows[i], 0, place + 16 - inside)",
        FIVE_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a window that crosses a word loses its upper bits",
        _WORDS,
        "bit % 32 > 16 ? low |",
        "bit % 32 > 32 ? low |",
        FIVE_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the second code of a pair is the next one",
        _WORDS,
        "Native<W>::HALF + begin",
        "W::BITS + begin",
        EIGHT_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "nibbles are paired as other codes are",
        _WORDS,
        "W::BITS == 4 || Native<W>::HALF == 16",
        "Native<W>::HALF == 16",
        GEMM_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows are counted in half their units",
        _LANE,
        "work.k / 8 * W::BITS / UNIT",
        "work.k / 16 * W::BITS / UNIT",
        THREE_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows are counted in words, whatever a lane loads",
        _LANE,
        "work.k / 8 * W::BITS / UNIT",
        "work.k / 8 * W::BITS / 4",
        FIVE_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "lanes begin a unit apart",
        _LANE,
        "uint(Native<W>::BYTES / UNIT * lane.pair)",
        "uint(lane.pair)",
        THREE_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "steps are counted in words, whatever a lane loads",
        _LANE,
        "W::BITS * 4 / Native<W>::UNIT",
        "W::BITS",
        THREE_NATIVE,
        Detector.WRONG_RESULT,
    ),
)

_VALUES = (
    Mutant(
        "small floats have their mantissa a bit too high",
        _WORDS,
        _PAIR_AT,
        f"{_PAIR_AT}  place += W::MODE == FLOATING && place < 16 - W::BITS ? 1 : 0;\n",
        MXFP4,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "small floats of another row",
        _WORDS,
        _PAIR_AT,
        f"{_PAIR_AT}  f ^= W::MODE == FLOATING ? 1 : 0;\n",
        NVFP4,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "symmetric codes count a quarter of their range too much",
        _DECODE,
        "SYMMETRIC ? 1 << (BITS_ - 1)",
        "SYMMETRIC ? 1 << (BITS_ - 2)",
        SYMMETRIC,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the upper half of a constant is a bit off",
        _DECODE,
        "return bits | bits << 16;",
        "return bits | bits << 15;",
        THREE_PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the bias of symmetric codes is read, which are stored without",
        _DECODE,
        "MODE_ == AFFINE || MODE_ == ZERO_POINT",
        "MODE_ != FLOATING",
        SYMMETRIC,
        Detector.OUTSIDE,
    ),
)

_GROUPS = (
    Mutant(
        "groups of 256 are taken to be of 512",
        _DECODE,
        "W::GROUP == 0 ? 1 : W::GROUP",
        "W::GROUP == 256 ? 512 : W::GROUP + (W::GROUP == 0 ? 1 : 0)",
        LONG_GROUPS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a row has a group for each step",
        _DECODE,
        "W::GROUP == 0 ? 0 : k",
        "W::GROUP == 0 ? k / 64 : k",
        WHOLE_ROWS,
        Detector.OUTSIDE,
    ),
    Mutant(
        "groups of 16: the bias is left out",
        _GEMM,
        "float2(scale), float2(bias))",
        "float2(scale), float2(0.0f))",
        SIXTEENS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "groups of 16: weights are rounded to half",
        _DECODE,
        "SCALED && MODE != FLOATING",
        "false",
        SIXTEENS,
        Detector.WRONG_RESULT,
    ),
)

_GLOBAL = (
    Mutant(
        "a global scale is dropped where tiles are split",
        _GEMM,
        "W::SCALED ? weight_scale : scale",
        "W::SCALED ? 1.0f : scale",
        GLOBAL,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "dot products: a global scale is dropped",
        _GEMV,
        "quantizers.scale * tile.weight_scale;",
        "quantizers.scale;",
        GLOBAL_GEMV,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "weights: a global scale is dropped",
        _DENSE,
        "decode_row<W>(values, words, f, quantizers, tile.weight_scale)",
        "decode_row<W>(values, words, f, quantizers, 1.0f)",
        GLOBAL_DENSE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a global scale is not divided by the largest product",
        _LANE,
        " / (6.0f * 448.0f);",
        ";",
        GLOBAL_GEMV,
        Detector.WRONG_RESULT,
    ),
)

_PLAIN = (
    Mutant(
        "weights: the values of a pair change places",
        _DENSE,
        "decode<W, float, true>(words, f, t)",
        "decode<W, float, true>(words, f, t).yx",
        DENSE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "weights: lanes store eight values apart",
        _DENSE,
        "k + W::CODES * lane.pair",
        "k + 8 * lane.pair",
        DENSE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "weights: a row past the last is stored",
        _DENSE,
        "if (inside < rows) {",
        "if (inside <= rows) {",
        DENSE_BACK,
        Detector.OUTSIDE,
    ),
    Mutant(
        "weights: every block begins at the first row",
        _DENSE,
        "row + tile_row, work",
        "tile_row, work",
        DENSE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "weights: every block has the codes of the first k",
        _DENSE,
        "load_words<W>(words, tile, first_k + k, lane_index);",
        "load_words<W>(words, tile, k, lane_index);",
        DENSE_BACK,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "weights: every block has the scales of the first k",
        _DENSE,
        "load_quantizers<W>(tile, first_k + k)",
        "load_quantizers<W>(tile, k)",
        DENSE_BACK,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "weights: rows are as long as the whole weight's",
        _DENSE,
        "uint(inside) * length",
        "uint(inside) * work.k",
        DENSE_BACK,
        Detector.OUTSIDE,
    ),
)

MUTANTS = (*_PLANES, *_NATIVE, *_VALUES, *_GROUPS, *_GLOBAL, *_PLAIN)
