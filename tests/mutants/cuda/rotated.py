"""Bugs in how CUDA kernels rotate and normalize heads."""

from mutants.cuda.pairs import ROTATED, ROTATED_NORMS
from mutants.mutant import Detector, Mutant

ROTATED_FAR = "packed, rotated heads at places of a million"

_ROTATED = "cuda/rotated.cuh"

MUTANTS = (
    Mutant(
        "cuda: heads are rotated the other way",
        _ROTATED,
        "angle",
        "$1 - $2.y * $3, $2.x * $3 +",
        "$1 + $2.y * $3, $2.y * $1 - $2.x * $3 + 0 *",
        ROTATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: all rows have the first one's place",
        _ROTATED,
        "rotate",
        "$1 ? $2 :",
        "",
        ROTATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: heads that are rotated are not multiplied",
        "cuda/rotated.cuh",
        "rotate",
        "$1[$2].y *= as_type<float>($3);",
        "",
        ROTATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: heads of v are rotated too",
        _ROTATED,
        "rotate",
        "($1 < $2)",
        "($1 < work.n)",
        ROTATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: a turn is a float",
        _ROTATED,
        "angle",
        "$1 = $2($3, 1.7484556e-7f, $1);",
        "",
        ROTATED_FAR,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: heads are one, as wide as all",
        _ROTATED,
        "first_of_pair",
        "/ $1 * $2 + $3 % $1",
        "",
        ROTATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: both halves of a head have the first one's bias",
        _ROTATED,
        "bias",
        "$1, $2 + $1",
        "$1, $2",
        ROTATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: heads of k have the weight of q's norm",
        _ROTATED,
        "norm",
        "($1 < $2 ? $3 : $4)",
        "$3",
        ROTATED_NORMS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: heads are normalized without epsilon",
        _ROTATED,
        "norm",
        "+ as_type<float>($1)",
        "",
        ROTATED_NORMS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: a head's second tile is no part of its norm",
        _ROTATED,
        "norm",
        "$1; ++$2) { $3 =",
        "1; ++$2) { $3 =",
        ROTATED_NORMS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: both halves of a head have the first one's weight",
        _ROTATED,
        "weight",
        "+ $1",
        "",
        ROTATED_NORMS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: a lane of a head has its own squares only",
        _ROTATED,
        "norm",
        "$1($2)",
        "$2 * 32",
        ROTATED_NORMS,
        Detector.WRONG_RESULT,
    ),
)
