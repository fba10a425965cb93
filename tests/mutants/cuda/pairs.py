"""Bugs in how CUDA kernels store pairs of columns: gate and up, rotated heads."""

from mutants.mutant import Detector, Mutant

GATED = "packed, gate and up, two slices"
ROTATED = "packed, rotated heads, two slices"
ROTATED_NORMS = "packed, rotated heads with norms, two slices"

_GATE, _GATED = "lib/gate.metal", "cuda/gated.cuh"
_PAIRS = "cuda/paired_epilogue.cuh"

MUTANTS = (
    Mutant(
        "cuda: up is what gates",
        _GATE,
        "",
        "($1) * $2",
        "($2) * $1",
        GATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: up's tiles are those beside gate's",
        _PAIRS,
        "",
        "$1 * $2($3)",
        "$1 * $1 * TILE_N",
        GATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: gate and up store past the end of a row",
        _PAIRS,
        "",
        "|| $1 >= $2 / 2",
        "",
        GATED,
        Detector.UNWRITTEN,
    ),
    Mutant(
        "cuda: a row of gate and up is as long as both",
        _GATED,
        "",
        "($1 / 2)",
        "$1",
        GATED,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: of gate and up the first slice alone counts",
        _PAIRS,
        "sum_of_slices",
        "< $1",
        "< 1",
        GATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: heads store past the end of a row",
        _PAIRS,
        "",
        "|| $1 >= $2 / 2",
        "",
        ROTATED,
        Detector.UNWRITTEN,
    ),
    Mutant(
        "cuda: tiles that are stored together are the first one again",
        _PAIRS,
        "",
        "($1 + $2)",
        "$1",
        ROTATED_NORMS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: a head begins in the tile after another one's first",
        _PAIRS,
        "",
        "* $1; const",
        "; const",
        ROTATED_NORMS,
        Detector.UNWRITTEN,
    ),
)
