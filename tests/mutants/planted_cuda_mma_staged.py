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
_GIVEN_BACK = (
    "if (lane_index == 0) {\n          barrier_arrive(ring.empty(turn.stage));\n"
)

MUTANTS = (
    Mutant(
        "cuda: mma_staged: every pair of fragments is stored where the first is",
        _MMA,
        "own + of_pair<FRAGMENTS>(product, i)",
        "own + of_pair<FRAGMENTS>(product, 0)",
        FOUR,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "cuda: mma_staged: both halves of a stage read the first one's x",
        _MMA,
        "Order::of_pair<FRAGMENTS>(product, i)",
        "Order::of_pair<FRAGMENTS>(j, i)",
        WHOLE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: two products' columns of an odd fragment change places",
        _MMA,
        "product % 2 * 8",
        "(1 - product % 2) * 8",
        ODD,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: columns of an odd fragment are read once a half",
        _MMA,
        "if (j % 2 == 0) {",
        "if (j == 0) {",
        ODD,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: an odd fragment lies over others",
        _MMA,
        "STAGE_PRODUCTS * (FRAGMENTS / 2)",
        "TILE_K / 16 * (FRAGMENTS / 2)",
        ODD,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: a stage is given back before all lanes have read it",
        _MMA,
        "        warp_sync();  // all lanes have read it\n",
        "",
        WHOLE,
        Detector.RACE,
    ),
    Mutant(
        "cuda: mma_staged: stages are never given back",
        _MMA,
        _GIVEN_BACK,
        _GIVEN_BACK.replace("lane_index == 0", "false"),
        WHOLE,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: mma_staged: the next stage is given back",
        _MMA,
        "ring.empty(turn.stage)",
        "ring.empty((turn.stage + SLICES) % STAGES)",
        WHOLE,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: mma_staged: a stage past the last one is waited for",
        _MMA,
        "if (ahead > 0 && k >= split.k_stop) {",
        "if (false) {",
        WHOLE,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: mma_staged: a split's last half stage is multiplied whole",
        _MMA,
        "if (half > 0 && k + half * TILE_K >= split.k_stop) {",
        "if (false) {",
        SLICED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: the next words are loaded over those in use",
        _MMA,
        "          uint last[4];\n",
        "          uint last[4];\n          incoming.load(ahead, half, work);\n",
        WHOLE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: the next numbers are loaded over those in use",
        _STAGED,
        "if (half + 1 == HALVES || SETS > 1) {",
        "{",
        PAIRS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: numbers of groups longer than a stage move on with stages",
        _STAGED,
        "W::GROUP == 0 || W::GROUP > STAGE_K",
        "W::GROUP == 0",
        LONG,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: mma_staged: a slice's turn counts as one stage",
        _STAGED,
        "    k += SLICES * STAGE_K;\n",
        "    k += STAGE_K;\n",
        WHOLE,
        Detector.OUTSIDE,
    ),
)
