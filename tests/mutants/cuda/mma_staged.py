"""Bugs where warps read x out of stages: its order there, and weights on their way.

The ring's own are in planted_cuda_staged.py.
"""

from mutants.mutant import Detector, Mutant

WHOLE = "mma_staged, two slices, whole k"
ODD = "mma_staged, three fragments, two slices, whole k"
FOUR = "mma_staged, four fragments"
SLICED = "mma_staged, k cut inside a stage"
PAIRS = "mma_staged, groups of 128"
LONG = "mma_staged, groups of 256, one slice"

_MMA, _STAGED = "cuda/mma_staged.cuh", "cuda/staged.cuh"

MUTANTS = (
    Mutant(
        "cuda: mma_staged: every pair of fragments is stored where the first is",
        _MMA,
        "store",
        "$1, $2",
        "$1, 0",
        FOUR,
        Detector.TOO_EARLY,
        nth=(3, 3),
    ),
    Mutant(
        "cuda: mma_staged: both halves of a stage read the first one's x",
        _MMA,
        "multiply_stages",
        "($1, $2)",
        "(j, $2)",
        WHOLE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: two products' columns of an odd fragment change places",
        _MMA,
        "store",
        "$1 % 2 *",
        "(1 - $1 % 2) *",
        ODD,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: columns of an odd fragment are read once a half",
        _MMA,
        "",
        "% 2 ==",
        "==",
        ODD,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: an odd fragment lies over others",
        _MMA,
        "of_last",
        "$1 *",
        "TILE_K / 16 *",
        ODD,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: a stage is given back before all lanes have read it",
        _MMA,
        "",
        "$1(); if",
        "if",
        WHOLE,
        Detector.RACE,
    ),
    Mutant(
        "cuda: mma_staged: stages are never given back",
        _MMA,
        "multiply_stages",
        "$1 == 0",
        "false",
        WHOLE,
        Detector.OUT_OF_STEP,
        nth=(2, 2),
    ),
    Mutant(
        "cuda: mma_staged: the next stage is given back",
        _MMA,
        "multiply_stages",
        "($1($2))",
        "($1(($2 + SLICES) % STAGES))",
        WHOLE,
        Detector.OUT_OF_STEP,
        nth=(2, 2),
    ),
    Mutant(
        "cuda: mma_staged: a stage past the last one is waited for",
        _MMA,
        "",
        "$1 > 0 && $2 >= $3",
        "false",
        WHOLE,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: mma_staged: a split's last half stage is multiplied whole",
        _MMA,
        "",
        "half > 0 && $1 + half * $2 >= $3",
        "false",
        SLICED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: the next words are loaded over those in use",
        _MMA,
        "",
        "$1[4]; $2 for",
        "$1[4]; incoming.load(ahead, half, work); $2 for",
        WHOLE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: the next numbers are loaded over those in use",
        _STAGED,
        "",
        "if (half + 1 == $1 || $2 > 1)",
        "",
        PAIRS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: numbers of groups longer than a stage move on with stages",
        _STAGED,
        "",
        "|| $1 > $2",
        "",
        LONG,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: a slice's turn counts as one stage",
        _STAGED,
        "",
        "+= $1 *",
        "+=",
        WHOLE,
        Detector.OUTSIDE,
    ),
)
