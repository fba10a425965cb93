"""Bugs in the ring of stages and in wgmma: turns, who waits for whom, and borders.

That products are complete only when somebody has waited for them, and that they see
stored values only behind a fence, the CPU does not show: there are no bugs of that
kind here. What "mma_staged" has of its own is in planted_cuda_mma_staged.py.
"""

from mutants.mutant import Detector, Mutant

WHOLE = "wgmma, two slices, whole k"
STREAM = "wgmma, streams, two slices"
SLICED = "wgmma, k cut inside a stage"
HALVES = "wgmma, loaders bring half stages"
MANY_WARPS = "wgmma, two warpgroups side by side, two slices, whole k"
TAIL = "wgmma, groups of 32, k tail"
INFINITE = "wgmma, groups of 32, k tail, x ends in an infinity"
ODD_X = "wgmma, odd offset of x"
ODD_WORDS = "wgmma, odd offset of words"
ODD_SCALES = "wgmma, odd offset of scales"

_STAGES, _STAGED = "cuda/stages.cuh", "cuda/staged.cuh"
_WGMMA = "cuda/wgmma.cuh"

MUTANTS = (
    Mutant(
        "cuda: wgmma: a turn's parity never changes",
        _STAGES,
        "      parity ^= 1;\n",
        "",
        WHOLE,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: wgmma: nobody waits until a place is free",
        _STAGES,
        "if (first + nth >= STAGES) {",
        "if (false) {",
        WHOLE,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: wgmma: a stage is said to be full before it is",
        _STAGES,
        "      store_tile_of_x<FRAGMENTS, ORDER, W>(\n",
        "      if (h == 0 && lane_index == 0) {\n"
        "        barrier_arrive(ring.full(turn.stage));\n"
        "      }\n"
        "      store_tile_of_x<FRAGMENTS, ORDER, W>(\n",
        WHOLE,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: wgmma: the stage that is being read is given back",
        _WGMMA,
        "barrier_arrive(ring.empty(read));\n            }\n          }",
        "barrier_arrive(ring.empty(turn.stage));\n            }\n          }",
        WHOLE,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: wgmma: many warps never give a stage back",
        _WGMMA,
        "} else if (lane_index == 0) {\n"
        "          barrier_arrive(ring.empty(turn.stage));",
        "} else if (false) {\n          barrier_arrive(ring.empty(turn.stage));",
        MANY_WARPS,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: wgmma: one column of warpgroups gives stages back for both",
        _STAGED,
        "barrier_init(ring.empty(i), COLUMNS)",
        "barrier_init(ring.empty(i), TOGETHER)",
        MANY_WARPS,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: wgmma: a stage is full when half of it is",
        _STAGED,
        "barrier_init(ring.full(i), pieces_of_stage<FRAGMENTS_M>())",
        "barrier_init(ring.full(i), 1)",
        HALVES,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: wgmma: loaders stop when half of all pieces are there",
        _STAGES,
        "piece < stages * PIECES",
        "piece < stages",
        HALVES,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: wgmma: every loader of halves brings the first",
        _STAGES,
        "piece % PIECES * PIECE_HALVES",
        "0",
        HALVES,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "cuda: wgmma: matrices of x lie in another order",
        _WGMMA,
        "(2 * product + i % 2) * FRAGMENTS + i / 2",
        "i / 2 * (2 * STAGE_PRODUCTS) + 2 * product + i % 2",
        WHOLE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: wgmma: a product reads another one's matrices",
        _WGMMA,
        "2 * (half * PRODUCTS + j + i / 2) * FRAGMENTS",
        "(2 * (half * PRODUCTS + j) + i / 2) * FRAGMENTS",
        WHOLE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: wgmma: rows past the end of x are read",
        _STAGES,
        "min(split.row + FRAGMENT_ROWS * i + lane.row, work.m - 1)",
        "(split.row + FRAGMENT_ROWS * i + lane.row)",
        WHOLE,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: wgmma: values past the end of a row are read",
        _STAGES,
        "min(first_of_step<W>(k, step, lane), work.k - W::CODES)",
        "first_of_step<W>(k, step, lane)",
        TAIL,
        Detector.OUTSIDE,
    ),
    Mutant(
        "cuda: wgmma: what pads a weight is not multiplied by zeros",
        _STAGES,
        "inside ? columns[i][j] : 0",
        "columns[i][j]",
        INFINITE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: wgmma: a split's last half stage is multiplied whole",
        _WGMMA,
        "if (half > 0 && k + half * TILE_K >= split.k_stop) {",
        "if (false) {",
        SLICED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: wgmma: every slice begins with the first stage's weights",
        _WGMMA,
        "int k = split.k_start + slice * STAGE_K;",
        "int k = split.k_start;",
        WHOLE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: wgmma: every slice begins at the first place",
        _WGMMA,
        "Turn<STAGES> turn(first + slice);",
        "Turn<STAGES> turn(first);",
        WHOLE,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: wgmma: later splits are multiplied from the ring's beginning",
        _WGMMA,
        "Turn<STAGES> turn(first + slice);",
        "Turn<STAGES> turn(slice);",
        STREAM,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: wgmma: later splits are filled in from the ring's beginning",
        _STAGES,
        "const Turn<STAGES> turn(first + nth);",
        "const Turn<STAGES> turn(nth);",
        STREAM,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: wgmma: later splits do not know of those before",
        _STAGED,
        "    first += ceil_div(split.k_stop - split.k_start, STAGE_K);\n",
        "",
        STREAM,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: wgmma: only whole stages of a split before count",
        _STAGED,
        "first += ceil_div(split.k_stop - split.k_start, STAGE_K)",
        "first += (split.k_stop - split.k_start) / STAGE_K",
        STREAM,
        Detector.OUT_OF_STEP,
    ),
    Mutant(
        "cuda: wgmma: sums are stored while stages are read",
        _STAGED,
        "STAGE_K);\n    __syncthreads();\n    if (warp < MULTIPLIERS",
        "STAGE_K);\n    if (warp < MULTIPLIERS",
        WHOLE,
        Detector.RACE,
    ),
    Mutant(
        "cuda: wgmma: no barrier before the store",
        _STAGED,
        "    __syncthreads();\n    store_tile",
        "    store_tile",
        WHOLE,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "cuda: wgmma: no barrier after the store",
        _STAGED,
        "    if (SINGLE) {\n      break;\n    }\n    __syncthreads();\n",
        "    if (SINGLE) {\n      break;\n    }\n",
        STREAM,
        Detector.RACE,
    ),
    Mutant(
        "cuda: wgmma: a block ends after its first split",
        _STAGED,
        "if (SINGLE)",
        "if (true)",
        STREAM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: wgmma: the next weights are those of the next slice's stage",
        _STAGED,
        "advance(SLICES * STAGE_K);",
        "advance(STAGE_K);",
        WHOLE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: wgmma: the next numbers are those of another group",
        _STAGED,
        "(SETS == 1 ? 0 : half * TILE_K)",
        "0",
        STREAM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "cuda: wgmma: x is not looked at for alignment",
        _STAGED,
        "is_aligned(x) && is_aligned(w) && is_aligned(scales)",
        "is_aligned(w) && is_aligned(scales)",
        ODD_X,
        Detector.MISALIGNED,
    ),
    Mutant(
        "cuda: wgmma: words are not looked at for alignment",
        _STAGED,
        "is_aligned(x) && is_aligned(w) && is_aligned(scales)",
        "is_aligned(x) && is_aligned(scales)",
        ODD_WORDS,
        Detector.MISALIGNED,
    ),
    Mutant(
        "cuda: wgmma: scales are not looked at for alignment",
        _STAGED,
        "is_aligned(x) && is_aligned(w) && is_aligned(scales)",
        "is_aligned(x) && is_aligned(w)",
        ODD_SCALES,
        Detector.MISALIGNED,
    ),
)
