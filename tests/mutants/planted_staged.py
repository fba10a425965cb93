"""Bugs in `gemm_staged`: buffers, barriers, roles and shares of a stage."""

from mutants.cases import (
    STAGED_GLOBAL,
    STAGED_LEFT_OUT,
    STAGED_NVFP4,
    STAGED_ONE,
    STAGED_SCRATCH,
    STAGED_THREE,
    STAGED_TWO,
    STAGED_WIDE,
)
from mutants.mutant import Detector, Mutant

_GEMM = "lib/gemm_staged"
_STAGING = "lib/staging"
_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_PROLOGUE = f"    if (AHEAD > 0) {{\n      {_BARRIER}\n    }}\n"
_LOADED = f"      if (AHEAD == 0) {{\n        {_BARRIER}\n      }}\n"
_MULTIPLIED = f"      {_BARRIER}\n    }}\n    if (rows"
_STORED = f"    if (WHOLE) {{\n      break;\n    }}\n    {_BARRIER}"


def _but(buffers: int) -> str:
    """The barrier after a stage, for other numbers of buffers only."""
    return _MULTIPLIED.replace(_BARRIER, f"if (L::BUFFERS != {buffers}) {_BARRIER}")


_BARRIERS = (
    Mutant(
        "staged: one buffer is overwritten while it is read",
        _GEMM,
        _MULTIPLIED,
        _but(1),
        STAGED_ONE,
        Detector.RACE,
    ),
    Mutant(
        "staged: two buffers, no barrier after a stage",
        _GEMM,
        _MULTIPLIED,
        _but(2),
        STAGED_TWO,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "staged: three buffers, no barrier after a stage",
        _GEMM,
        _MULTIPLIED,
        _but(3),
        STAGED_THREE,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "staged: three buffers, a barrier after every other stage",
        _GEMM,
        _MULTIPLIED,
        _MULTIPLIED.replace(_BARRIER, f"if (stage % 2 == 0) {_BARRIER}"),
        STAGED_LEFT_OUT,
        Detector.RACE,
    ),
    Mutant(
        "staged: no barrier between loading the only buffer and reading it",
        _GEMM,
        _LOADED,
        "",
        STAGED_ONE,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "staged: every number of buffers has the barrier of one",
        _GEMM,
        "if (AHEAD == 0) {",
        "if (AHEAD >= 0) {",
        STAGED_LEFT_OUT,
        Detector.COUNTERS,
    ),
    Mutant(
        "staged: no barrier after the first loads",
        _GEMM,
        _PROLOGUE,
        "",
        STAGED_TWO,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "staged: the barrier after a stage is a simdgroup's",
        _GEMM,
        _MULTIPLIED,
        _MULTIPLIED.replace("threadgroup_barrier", "simdgroup_barrier"),
        STAGED_THREE,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "staged: the barrier after a stage orders device memory",
        _GEMM,
        _MULTIPLIED,
        _MULTIPLIED.replace("mem_threadgroup", "mem_device"),
        STAGED_TWO,
        Detector.RACE,
    ),
    Mutant(
        "staged: each role waits at a barrier of its own",
        _GEMM,
        _MULTIPLIED,
        _MULTIPLIED.replace(
            _BARRIER, f"if (loads) {{ {_BARRIER} }} else {{ {_BARRIER} }}"
        ),
        STAGED_WIDE,
        Detector.BARRIER_SITES,
    ),
    Mutant(
        "staged: loaders do not wait for the last to multiply",
        _GEMM,
        _MULTIPLIED,
        _MULTIPLIED.replace(_BARRIER, f"if (multiplies) {_BARRIER}"),
        STAGED_WIDE,
        Detector.RACE,
    ),
    Mutant(
        "staged: no barrier between the scratch and the next tile's stages",
        _GEMM,
        _STORED,
        _STORED.replace(f"    {_BARRIER}", ""),
        STAGED_THREE,
        Detector.RACE,
    ),
)

_BUFFERS = (
    Mutant(
        "staged: the buffer of the stage before is multiplied",
        _GEMM,
        "buffers + stage % L::BUFFERS",
        "buffers + (stage + L::BUFFERS - 1) % L::BUFFERS",
        STAGED_TWO,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "staged: the buffer of the next stage is multiplied",
        _GEMM,
        "buffers + stage % L::BUFFERS",
        "buffers + (stage + 1) % L::BUFFERS",
        STAGED_LEFT_OUT,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "staged: three buffers are used like two",
        _STAGING,
        "buffers + stage % L::BUFFERS",
        "buffers + stage % 2",
        STAGED_THREE,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "staged: loads look as far ahead as there are buffers",
        _GEMM,
        "AHEAD = L::BUFFERS - 1;",
        "AHEAD = L::BUFFERS;",
        STAGED_TWO,
        Detector.RACE,
    ),
    Mutant(
        "staged: buffers overlap",
        _STAGING,
        "STAGE = WEIGHTS + SIMDGROUPS_K * TILE_M * W::STEP;",
        "STAGE = WEIGHTS + SIMDGROUPS_K * (TILE_M - 8) * W::STEP;",
        STAGED_TWO,
        Detector.RACE,
    ),
    Mutant(
        "staged: there is memory for one buffer only",
        _STAGING,
        "STAGES = BUFFERS * STAGE",
        "STAGES = STAGE",
        STAGED_WIDE,
        Detector.OUTSIDE,
    ),
    Mutant(
        "staged: the scratch has no more memory than the buffers",
        _STAGING,
        "STAGES > SCRATCH ? STAGES : SCRATCH",
        "STAGES",
        STAGED_SCRATCH,
        Detector.OUTSIDE,
    ),
    Mutant(
        "staged: what lies past a split's end is loaded",
        _STAGING,
        "k >= split.k_stop",
        "k >= split.k_stop + W::STEP",
        STAGED_THREE,
        Detector.OUTSIDE,
    ),
    Mutant(
        "staged: what lies past a split's end is multiplied",
        _GEMM,
        "k < split.k_stop && rows > 8",
        "rows > 8",
        STAGED_THREE,
        Detector.UNWRITTEN,
    ),
    Mutant(
        "staged: a split has too many stages",
        _GEMM,
        "ceil_div(split.k_stop - split.k_start, W::STEP * place.turns)",
        "split.k_stop / W::STEP + 1",
        STAGED_LEFT_OUT,
        Detector.COUNTERS,
    ),
    Mutant(
        "staged: a split's last stage is left out",
        _GEMM,
        "ceil_div(split.k_stop - split.k_start, W::STEP * place.turns)",
        "(split.k_stop - split.k_start) / (W::STEP * place.turns)",
        STAGED_ONE,
        Detector.WRONG_RESULT,
    ),
)

_ROLES = (
    Mutant(
        "staged: a loader multiplies",
        _GEMM,
        "multiplies = simdgroup_index < L::MULTIPLYING",
        "multiplies = simdgroup_index <= L::MULTIPLYING",
        STAGED_WIDE,
        Detector.UNWRITTEN,
    ),
    Mutant(
        "staged: those that multiply load, and loaders do not",
        _GEMM,
        "L::LOADERS == 0 || !multiplies",
        "L::LOADERS == 0 || multiplies",
        STAGED_WIDE,
        Detector.OUTSIDE,
    ),
    Mutant(
        "staged: loaders take the shares of others",
        _GEMM,
        "simdgroup_index - (L::LOADERS == 0 ? 0 : L::MULTIPLYING)",
        "simdgroup_index",
        STAGED_WIDE,
        Detector.UNWRITTEN,
    ),
    Mutant(
        "staged: few loaders leave a share to others",
        _STAGING,
        "LOADING = LOADERS > 0 ? LOADERS : MULTIPLYING;",
        "LOADING = MULTIPLYING;",
        STAGED_THREE,
        Detector.UNWRITTEN,
    ),
    Mutant(
        "staged: simdgroups along k load the same",
        _STAGING,
        "LOADING = LOADERS > 0 ? LOADERS : MULTIPLYING;",
        "LOADING = LOADERS > 0 ? LOADERS : SIMDGROUPS_M;",
        STAGED_ONE,
        Detector.RACE,
    ),
    Mutant(
        "staged: loaders store what others store",
        _GEMM,
        "L::MULTIPLYING + L::LOADERS>",
        "L::MULTIPLYING>",
        STAGED_WIDE,
        Detector.RACE,
    ),
)

_SHARES = (
    Mutant(
        "staged: a last fragment of x is left out",
        _STAGING,
        "ceil_div(min(L::TILE_M, work.m - split.row), 8)",
        "min(L::TILE_M, work.m - split.row) / 8",
        STAGED_TWO,
        Detector.UNWRITTEN,
    ),
    Mutant(
        "staged: m is clamped one row late",
        _STAGING,
        "work.m - 1);",
        "work.m);",
        STAGED_TWO,
        Detector.OUTSIDE,
    ),
    Mutant(
        "staged: simdgroups along k have the weights of other columns",
        _STAGING,
        "TILE_N * (nth / place.turns)",
        "TILE_N * nth",
        STAGED_ONE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "staged: simdgroups side by side have one column's weights",
        _STAGING,
        "TILE_N * (nth / place.turns)",
        "0",
        STAGED_WIDE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "staged: turns and stages change places",
        _STAGING,
        "stage * place.turns + turn)",
        "stage + turn * place.turns)",
        STAGED_ONE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "staged: another turn's activations",
        _GEMM,
        "(place.row / 8 + j) * place.turns + place.turn",
        "(place.row / 8 + j) * place.turns",
        STAGED_ONE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "staged: another column's codes",
        _GEMM,
        "place.column * place.turns + place.turn",
        "place.turn",
        STAGED_WIDE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "staged: activations are not summed over a fragment's rows",
        _GEMM,
        "sum_over_rows(sums[j].x)",
        "sums[j].x",
        STAGED_ONE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "staged: sums are of the first fragment of x",
        _GEMM,
        "sums[j] += float2(",
        "sums[0] += float2(",
        STAGED_TWO,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "staged: groups of 16 are staged without their scale",
        _STAGING,
        "    quantizers = load_quantizers<W>(tile, k);\n",
        "",
        STAGED_NVFP4,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "staged: a global scale is dropped",
        _GEMM,
        "quantizers, tile.weight_scale, cols);",
        "quantizers, 1.0f, cols);",
        STAGED_GLOBAL,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "staged: fragments of w are stored a step apart from where they are read",
        _STAGING,
        "words, f, i % W::PAIRS, quantizers.scale[f]",
        "words, f, (i + 1) % W::PAIRS, quantizers.scale[f]",
        STAGED_TWO,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "staged: fragments past the last row are computed",
        _GEMM,
        "rows > 8 * (FRAGMENTS_M - 1)) {\n        multiply_stage",
        "rows > 0) {\n        multiply_stage",
        STAGED_LEFT_OUT,
        Detector.UNWRITTEN,
    ),
    Mutant(
        "staged: weights are decoded by each simdgroup along m",
        _STAGING,
        "    if (is_weight) {\n",
        "    for (int again = 0; is_weight && again < L::SIMDGROUPS_M; ++again) {\n"
        "      uint words[words_of_step<W>()];\n"
        "      load_words<W>(words, weight_tile<W>(operands.w, operands.scales,\n"
        "          operands.biases, split.col, work, lane_index), k, lane_index);\n"
        "      simdgroup_store(row_fragment<W, F, SUBTRACT>(words, 0, 0, 1.0f, 0.0f),\n"
        "          buffer + nth * L::CHUNK, 8);\n"
        "    }\n"
        "    if (is_weight) {\n",
        STAGED_LEFT_OUT,
        Detector.COUNTERS,
    ),
)

MUTANTS = (*_BARRIERS, *_BUFFERS, *_ROLES, *_SHARES)
