"""Bugs in `gemm_register`: barriers, fragments and the scratch."""

from mutants.cases import (
    FIVE_NATIVE,
    GEMM_IDLE,
    GEMM_LEFT_OUT,
    GEMM_NATIVE,
    GEMM_PACKED,
    GEMM_TAIL,
    HYTIS,
    MXFP4,
    NVFP4,
    WHOLE_GEMM,
)
from mutants.mutant import Detector, Mutant

_GEMM = "lib/gemm_register"
_VALUES = "lib/values"
_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_BEFORE_STORE = f"    {_BARRIER}\n    store_tile"
_BREAK = "    if (WHOLE) {\n      break;\n    }\n"
_AFTER_STORE = f"{_BREAK}    {_BARRIER}"
_BOTH_FRAGMENTS = """\
      accumulate<FRAGMENTS_M, RAGGED, W, SUBTRACT, WIDEN>(
          totals, x, order, tile, row, cols, work, split, place, lane_index);
      write_scratch<FRAGMENTS_M>(scratch, totals, corner);
"""
_ONE_BY_ONE = """\
      for (int j = 0; j < FRAGMENTS_M; ++j) {
        accumulate<1, RAGGED, W, SUBTRACT, WIDEN>(
            totals, x, order, tile, row + 8 * j, cols, work, split, place,
            lane_index);
        write_scratch<1>(scratch, totals, corner + 8 * j * SCRATCH_ROW);
      }
"""

_BARRIERS = (
    Mutant(
        "gemm: no barrier before the store",
        _GEMM,
        _BEFORE_STORE,
        "    store_tile",
        GEMM_NATIVE,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "gemm: no barrier after the store",
        _GEMM,
        _AFTER_STORE,
        _BREAK,
        GEMM_PACKED,
        Detector.RACE,
    ),
    Mutant(
        "gemm: the barrier before the store orders nothing",
        _GEMM,
        _BEFORE_STORE,
        _BEFORE_STORE.replace("mem_threadgroup", "mem_none"),
        GEMM_NATIVE,
        Detector.RACE,
    ),
    Mutant(
        "gemm: the barrier after the store orders device memory",
        _GEMM,
        _AFTER_STORE,
        _AFTER_STORE.replace("mem_threadgroup", "mem_device"),
        GEMM_PACKED,
        Detector.RACE,
    ),
    Mutant(
        "gemm: the barrier before the store is a simdgroup's",
        _GEMM,
        _BEFORE_STORE,
        _BEFORE_STORE.replace("threadgroup_barrier", "simdgroup_barrier"),
        GEMM_PACKED,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "gemm: simdgroups wait at two barriers",
        _GEMM,
        _BEFORE_STORE,
        f"    if (place.turn == 0) {{\n      {_BARRIER}\n    }} else {{\n"
        f"      {_BARRIER}\n    }}\n    store_tile",
        GEMM_NATIVE,
        Detector.BARRIER_SITES,
    ),
    Mutant(
        "gemm: only one simdgroup waits after the store",
        _GEMM,
        _AFTER_STORE,
        f"{_BREAK}    if (simdgroup_index == 0) {{\n      {_BARRIER}\n    }}",
        GEMM_NATIVE,
        Detector.MISSING_THREADS,
    ),
    Mutant(
        "gemm: a barrier follows a threadgroup's only tile",
        _GEMM,
        _BREAK,
        "",
        WHOLE_GEMM,
        Detector.COUNTERS,
    ),
    Mutant(
        "gemm: there is no other tile after the first",
        _GEMM,
        _BREAK,
        "    break;\n",
        GEMM_NATIVE,
        Detector.WRONG_RESULT,
    ),
)

_FRAGMENTS = (
    Mutant(
        "m is clamped one row late",
        _GEMM,
        "work.m - 1);",
        "work.m);",
        GEMM_NATIVE,
        Detector.OUTSIDE,
    ),
    Mutant(
        "a k tail is left out",
        _GEMM,
        "k < split.k_stop;",
        "k + TILE_K <= split.k_stop;",
        GEMM_TAIL,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the totals keep what the split before has left",
        _GEMM,
        "totals[i] = float2(0.0f);",
        "totals[i] = split.k_start == 0 ? float2(0.0f) : totals[i];",
        GEMM_IDLE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the biases of another row fragment",
        _GEMM,
        "quantizers.bias[i / FRAGMENTS]",
        "quantizers.bias[i % 4]",
        GEMM_IDLE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a lane's two columns change places",
        _GEMM,
        "runs[2 * j * RUNS + h][s], runs[(2 * j + 1) * RUNS + h][s]",
        "runs[(2 * j + 1) * RUNS + h][s], runs[2 * j * RUNS + h][s]",
        GEMM_PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the offset is taken off by the first fragment's sum",
        _GEMM,
        "-float(W::ZERO) * sums[j]",
        "-float(W::ZERO) * sums[0]",
        GEMM_PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the offset is taken off the other column",
        _GEMM,
        "make_fragment<float>(start.x, start.y)",
        "make_fragment<float>(start.y, start.x)",
        GEMM_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the codes' offset is taken off twice",
        _GEMM,
        "EXACT || W::ZERO == 0 ? float2(0.0f)",
        "W::ZERO == 0 ? float2(0.0f)",
        GEMM_IDLE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the codes' offset is never taken off",
        _GEMM,
        "EXACT || W::ZERO == 0 ? float2(0.0f)",
        "EXACT || W::ZERO != 0 ? float2(0.0f)",
        FIVE_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "groups of 16: codes are multiplied without their scale",
        _GEMM,
        ": float2(values) * scale;",
        ": float2(values);",
        NVFP4,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "small floats stay as small as halves hold them",
        _VALUES,
        "halves * half(W::FACTOR)",
        "halves",
        MXFP4,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "groups of 16: the scale is applied twice",
        _GEMM,
        "W::SCALED ? weight_scale : scale",
        "scale",
        NVFP4,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "small floats lose their sign",
        _GEMM,
        "vec<V, 2> values = decode<W, V, EXACT>(words, f, step);",
        "vec<V, 2> values = decode<W, V, EXACT>(words, f, step);\n"
        "    values = W::MODE == FLOATING ? abs(values) : values;",
        MXFP4,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "row fragments add to each other's totals",
        _GEMM,
        "totals + f * FRAGMENTS",
        "totals + f",
        GEMM_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "weights are narrower than activations",
        _GEMM,
        "struct WeightFragment<F, true> {\n  typedef F type;",
        "struct WeightFragment<F, true> {\n  typedef half type;",
        GEMM_TAIL,
        Detector.OPERANDS,
    ),
    Mutant(
        "a pointer without an address space",
        _GEMM,
        "    const device T* x,\n    R order,",
        "    const T* x,\n    R order,",
        GEMM_TAIL,
        Detector.STATIC_CHECK,
    ),
    Mutant(
        "a pointer into the wrong address space",
        _GEMM,
        "write_scratch(threadgroup float* scratch,",
        "write_scratch(device float* scratch,",
        GEMM_TAIL,
        Detector.STATIC_CHECK,
    ),
)

_TILES = (
    Mutant(
        "a ragged tile is left a row fragment early",
        _GEMM,
        "RAGGED && 8 * f >= cols",
        "RAGGED && 8 * f + 8 >= cols",
        WHOLE_GEMM,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a ragged tile is left a row fragment late",
        _GEMM,
        "RAGGED && 8 * f >= cols",
        "RAGGED && 8 * f > cols",
        WHOLE_GEMM,
        Detector.COUNTERS,
    ),
    Mutant(
        "fragments past the last row are computed",
        _GEMM,
        "work.m - row > 8 * (FRAGMENTS_M - 1)",
        "work.m > row",
        GEMM_LEFT_OUT,
        Detector.COUNTERS,
    ),
    Mutant(
        "weights are read once for each fragment",
        _GEMM,
        _BOTH_FRAGMENTS,
        _ONE_BY_ONE,
        GEMM_LEFT_OUT,
        Detector.COUNTERS,
    ),
    Mutant(
        "a ragged second fragment is left out",
        _GEMM,
        "work.m - row > 8 * (FRAGMENTS_M - 1)",
        "work.m - row >= 8 * FRAGMENTS_M",
        GEMM_NATIVE,
        Detector.UNWRITTEN,
    ),
    Mutant(
        "simdgroups in m and in k change places",
        _GEMM,
        "(simdgroup_index / SIMDGROUPS_M * TILE_M + place.row",
        "(simdgroup_index % SIMDGROUPS_K * TILE_M + place.row",
        GEMM_PACKED,
        Detector.RACE,
    ),
    Mutant(
        "partial tiles of simdgroups overlap",
        _GEMM,
        "(simdgroup_index / SIMDGROUPS_M * TILE_M + place.row",
        "(simdgroup_index / SIMDGROUPS_M * (TILE_M - 8) + place.row",
        GEMM_NATIVE,
        Detector.RACE,
    ),
    Mutant(
        "pairs of lanes write one row",
        _GEMM,
        "place.row + 2 * lane.pair)",
        "place.row + lane.pair)",
        GEMM_NATIVE,
        Detector.RACE,
    ),
    Mutant(
        "a lane writes its first column twice",
        _GEMM,
        "= totals[i].y;",
        "= totals[i].x;",
        GEMM_IDLE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "there is too little scratch",
        "kernels/gemm_register",
        "scratch[SIMDGROUPS_K * SIMDGROUPS_M * FRAGMENTS_M * 8 * marlin::SCRATCH_ROW]",
        "scratch[SIMDGROUPS_K * SIMDGROUPS_M * FRAGMENTS_M * 8 * 32]",
        GEMM_NATIVE,
        Detector.OUTSIDE,
    ),
    Mutant(
        "every threadgroup takes the first range",
        "kernels/gemm_register",
        "threadgroup_position_in_grid.x",
        "threadgroup_position_in_grid.y",
        GEMM_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemm: simdgroups side by side read one column's weights",
        _GEMM,
        "split.col + TILE_N * place.column",
        "split.col",
        HYTIS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemm: the wide tiles are one too few",
        _GEMM,
        "threadgroup_index < work.whole",
        "threadgroup_index + 1 < work.whole",
        HYTIS,
        Detector.WRONG_RESULT,
    ),
)

MUTANTS = (*_BARRIERS, *_FRAGMENTS, *_TILES)
