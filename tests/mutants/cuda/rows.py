"""Bugs in how the CUDA kernel "mma" normalizes rows."""

from mutants.mutant import Detector, Mutant

NORMED = "packed, normalized rows, three warps a row and two"
ODD_X = "packed, normalized rows, odd offset of x"
ODD_NORM = "packed, normalized rows, odd offset of the norm's weight"

_ROWS = "cuda/rows.cuh"

MUTANTS = (
    Mutant(
        "rows: squares are summed up, and not their mean",
        _ROWS,
        "prepare_rows",
        "/ $1",
        "",
        NORMED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows: nothing is added to the mean square",
        _ROWS,
        "",
        "+ as_type<float>($1)",
        "",
        NORMED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows: the norm has no weight",
        _ROWS,
        "",
        "* $1($2, $3())",
        "",
        NORMED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows: the first warp's squares stand for all",
        _ROWS,
        "prepare_rows",
        "$1; ++",
        "1; ++",
        NORMED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows: a lane's neighbour is left out of the sum",
        "cuda/warp.cuh",
        "",
        "0",
        "1",
        NORMED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows: all warps of a row have the same chunks",
        _ROWS,
        "",
        "32 * $1 +",
        "",
        NORMED,
        Detector.RACE,
    ),
    Mutant(
        "rows: they are read as if nothing lay between them",
        _ROWS,
        "row_of",
        "($1 + $2<$3>::$4)",
        "$1",
        NORMED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows: the weight lies in the first row's place",
        _ROWS,
        "copy_rows",
        "($1 + 1)",
        "$1",
        NORMED,
        Detector.RACE,
    ),
    Mutant(
        "rows: no barrier before squares are summed up",
        _ROWS,
        "prepare_rows",
        "__syncthreads();",
        "",
        NORMED,
        Detector.TOO_EARLY,
        nth=(1, 2),
    ),
    Mutant(
        "rows: no barrier before they are multiplied",
        _ROWS,
        "prepare_rows",
        "__syncthreads();",
        "",
        NORMED,
        Detector.TOO_EARLY,
        nth=(2, 2),
    ),
    Mutant(
        "rows: x is not looked at for alignment",
        _ROWS,
        "",
        "($1.x) && $2",
        "",
        ODD_X,
        Detector.MISALIGNED,
    ),
    Mutant(
        "rows: a norm's weight is not looked at for alignment",
        _ROWS,
        "",
        "&& $1($2)",
        "",
        ODD_NORM,
        Detector.MISALIGNED,
    ),
)
