"""Bugs in `gemv`: barriers, vectors and what lanes add up."""

from mutants.cases import GEMV_IDLE, GEMV_NATIVE, GEMV_TAIL
from mutants.mutant import Detector, Mutant

_GEMV = "lib/gemv"
_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_BEFORE_STORE = f"    {_BARRIER}\n    store_tile"
_BREAK = "    if (WHOLE) {\n      break;\n    }\n"
_AFTER_STORE = f"{_BREAK}    {_BARRIER}"

MUTANTS = (
    Mutant(
        "gemv: no barrier before the store",
        _GEMV,
        _BEFORE_STORE,
        "    store_tile",
        GEMV_IDLE,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "gemv: no barrier after the store",
        _GEMV,
        _AFTER_STORE,
        _BREAK,
        GEMV_TAIL,
        Detector.RACE,
    ),
    Mutant(
        "gemv: the barrier after the store orders nothing",
        _GEMV,
        _AFTER_STORE,
        _AFTER_STORE.replace("mem_threadgroup", "mem_none"),
        GEMV_TAIL,
        Detector.RACE,
    ),
    Mutant(
        "gemv: there is no other tile after the first",
        _GEMV,
        _BREAK,
        "    break;\n",
        GEMV_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemv: pairs of lanes write their parts over each other",
        _GEMV,
        "sum_over_pairs(totals[i / 4][i % 4]);\n    if (lane.pair == 0) {",
        "totals[i / 4][i % 4];\n    {",
        GEMV_NATIVE,
        Detector.RACE,
    ),
    Mutant(
        "gemv: the lanes of one row write",
        _GEMV,
        "if (lane.pair == 0) {",
        "if (lane.row == 0) {",
        GEMV_NATIVE,
        Detector.UNWRITTEN,
    ),
    Mutant(
        "gemv: rows of x are taken to be n wide",
        _GEMV,
        "uint(work.k)};",
        "uint(work.n)};",
        GEMV_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemv: activations of another pair",
        _GEMV,
        "run_offset<W>(2 * lane_of(lane_index).pair, 0)",
        "run_offset<W>(2 * (lane_of(lane_index).pair ^ 1), 0)",
        GEMV_TAIL,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemv: the first column's activations twice",
        _GEMV,
        "columns[RUNS + h][s]",
        "columns[h][s]",
        GEMV_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemv: half of the activations are summed",
        _GEMV,
        "sum_of_runs<2 * RUNS>",
        "sum_of_runs<RUNS>",
        GEMV_TAIL,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemv: partial rows of simdgroups overlap",
        _GEMV,
        "simdgroup_index * ROWS * SCRATCH_ROW",
        "simdgroup_index * SCRATCH_ROW",
        GEMV_NATIVE,
        Detector.RACE,
    ),
    Mutant(
        "gemv: every simdgroup computes all of k",
        _GEMV,
        "first_step(split, place); k <",
        "split.k_start; k <",
        GEMV_IDLE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemv: the biases are added in each step of the first row only",
        _GEMV,
        "fma(quantizers.bias, float4(sum), totals[row])",
        "fma(quantizers.bias, float4(row == 0 ? sum : 0.0f), totals[row])",
        GEMV_IDLE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemv: a k tail is left out",
        _GEMV,
        "k < split.k_stop;",
        "k + TILE_K <= split.k_stop;",
        GEMV_TAIL,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gemv: a pointer without an address space",
        _GEMV,
        "const device T* first = x",
        "const T* first = x",
        GEMV_TAIL,
        Detector.STATIC_CHECK,
    ),
    Mutant(
        "gemv: scratch for one simdgroup",
        "kernels/gemv",
        "scratch[SIMDGROUPS_K * ROWS * marlin::SCRATCH_ROW]",
        "scratch[ROWS * marlin::SCRATCH_ROW]",
        GEMV_NATIVE,
        Detector.OUTSIDE,
    ),
)
