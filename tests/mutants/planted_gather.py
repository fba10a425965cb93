"""Bugs in who multiplies which rows by which expert."""

from mutants.function_cases import EXPERT_OFFSETS
from mutants.gather_cases import (
    GATHER_COUNTED,
    GATHER_FEW,
    GATHER_FEW_COUNTED,
    GATHER_NATIVE,
    GATHER_PACKED,
)
from mutants.mutant import Detector, Mutant

_GATHER = "lib/gather"
_LANE = "lib/lane"
_BARRIER = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"

_LIST = (
    Mutant(
        "pairs of another expert are listed",
        _GATHER,
        "experts[min(pair, count - 1)] == expert ?",
        "experts[min(pair, count - 1)] != expert ?",
        GATHER_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "pairs past the last one are listed",
        _GATHER,
        "pair < count && experts",
        "experts",
        GATHER_NATIVE,
        Detector.OUTSIDE,
    ),
    Mutant(
        "pairs after the last whole run of 32 are missed",
        _GATHER,
        "base < count;",
        "base + 31 < count;",
        GATHER_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the list begins with the first pair in every round",
        _GATHER,
        "simd_prefix_exclusive_sum(chosen) - first;",
        "simd_prefix_exclusive_sum(chosen);",
        GATHER_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "pairs of a run of 32 are not counted",
        _GATHER,
        "found += simd_sum(chosen);",
        "found += base == 0 ? simd_sum(chosen) : 0;",
        GATHER_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the list has no end",
        _GATHER,
        "place >= 0 && place < TILE_M",
        "place >= 0",
        GATHER_NATIVE,
        Detector.OUTSIDE,
    ),
    Mutant(
        "the list has no beginning",
        _GATHER,
        "place >= 0 && place < TILE_M",
        "place < TILE_M",
        GATHER_NATIVE,
        Detector.OUTSIDE,
    ),
    Mutant(
        "all simdgroups write the list",
        _GATHER,
        "chosen != 0 && simdgroup_index == 0 &&",
        "chosen != 0 &&",
        GATHER_NATIVE,
        Detector.RACE,
    ),
    Mutant(
        "the last pair is not looked at",
        _GATHER,
        "const int count = shape[0];",
        "const int count = shape[0] - 1;",
        GATHER_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the last row of a tile is left out",
        _GATHER,
        "work.m = min(found - first, TILE_M);",
        "work.m = min(found - first, TILE_M - 1);",
        GATHER_PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "pairs after the last whole tile are left out",
        _GATHER,
        "first < found;",
        "first + TILE_M <= found;",
        GATHER_PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "tiles of rows overlap",
        _GATHER,
        "first += TILE_M",
        "first += TILE_M / 2",
        GATHER_COUNTED,
        Detector.COUNTERS,
    ),
)

_ROWS = (
    Mutant(
        "a pair takes the row of x of its own number",
        _GATHER,
        "return order.sources[order.pairs[row]];",
        "return order.pairs[row];",
        GATHER_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a product goes to the row of x that it came from",
        _GATHER,
        "  return order.pairs[row];",
        "  return order.sources[order.pairs[row]];",
        GATHER_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "partial tiles of an expert's simdgroups overlap",
        _GATHER,
        "(simdgroup_index / SIMDGROUPS_M * TILE_M + place.row",
        "(simdgroup_index / SIMDGROUPS_M * 8 + place.row",
        GATHER_PACKED,
        Detector.TOO_EARLY,
    ),
)

_WEIGHTS = (
    Mutant(
        "the codes are another expert's",
        _GATHER,
        "w += offset_of_expert(expert, size.x);",
        "w += offset_of_expert(expert ^ 3, size.x);",
        GATHER_PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the scales are the first expert's",
        _GATHER,
        "  scales += offset_of_expert(expert, size.y);\n",
        "",
        GATHER_PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the biases are the first expert's",
        _GATHER,
        "  biases += offset_of_expert(expert, size.y);\n",
        "",
        GATHER_NATIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "experts lie within 32 bits of the first",
        _GATHER,
        "return ulong(expert) * size;",
        "return expert * size;",
        EXPERT_OFFSETS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "columns and experts change places",
        _GATHER,
        "const uint expert = threadgroup_index / n_tiles;",
        "const uint expert = threadgroup_index % n_tiles;",
        GATHER_PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "packed experts lie apart without padding of n",
        _LANE,
        "const uint n_tiles = ceil_div(work.n, TILE_N);",
        "const uint n_tiles = work.n / TILE_N;",
        GATHER_PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "packed experts lie apart without padding of k",
        _LANE,
        "const uint k_tiles = ceil_div(work.k, TILE_K);",
        "const uint k_tiles = work.k / TILE_K;",
        GATHER_PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "packed experts have one value a group",
        _LANE,
        "packed_groups<W>(k_tiles) * (FACTORS * TILE_N)",
        "packed_groups<W>(k_tiles) * TILE_N",
        GATHER_PACKED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "native experts lie apart as if codes had 8 bits",
        _LANE,
        "uint2(work.k / 32 * W::BITS, group_at<W>(work.k))",
        "uint2(work.k / 4, group_at<W>(work.k))",
        GATHER_NATIVE,
        Detector.OUTSIDE,
    ),
)

_FEW = (
    Mutant(
        "of an expert's tile one row is multiplied",
        _GATHER,
        "work.m == 1",
        "work.m >= 1",
        GATHER_FEW,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "of an expert's tile two rows are multiplied",
        _GATHER,
        "work.m == 2",
        "work.m >= 2",
        GATHER_FEW,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "an expert of one row takes matrices",
        _GATHER,
        "DOT_ROWS >= 1 && work.m == 1",
        "DOT_ROWS >= 3 && work.m == 1",
        GATHER_FEW_COUNTED,
        Detector.COUNTERS,
    ),
    Mutant(
        "an expert of two rows takes matrices",
        _GATHER,
        "DOT_ROWS >= 2 && work.m == 2",
        "DOT_ROWS >= 3 && work.m == 2",
        GATHER_FEW_COUNTED,
        Detector.COUNTERS,
    ),
    Mutant(
        "both rows of an expert are the first",
        _GATHER,
        "input_row(order, row) * work.k",
        "input_row(order, 0) * work.k",
        GATHER_FEW,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "listed rows of x are taken to be n wide",
        _GATHER,
        "input_row(order, row) * work.k",
        "input_row(order, row) * work.n",
        GATHER_FEW,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "simdgroups side by side all have the same part of k",
        _GATHER,
        "place_of_simdgroup<1, SIMDGROUPS, 1>",
        "place_of_simdgroup<2, SIMDGROUPS, 1>",
        GATHER_FEW,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "half of the simdgroups have nobody to add their dot products",
        _GATHER,
        "store_tile<ROWS, SIMDGROUPS, 1, SIMDGROUPS>",
        "store_tile<ROWS, SIMDGROUPS / 2, 1, SIMDGROUPS>",
        GATHER_FEW,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "an expert's dot products overlap",
        _GATHER,
        "simdgroup_index * ROWS * SCRATCH_ROW",
        "simdgroup_index * SCRATCH_ROW",
        GATHER_FEW,
        Detector.RACE,
    ),
    Mutant(
        "an expert's dot products are stored before they are there",
        _GATHER,
        _BARRIER[2:] + "  store_tile",
        "  store_tile",
        GATHER_FEW,
        Detector.TOO_EARLY,
    ),
)

_WAITING = (
    Mutant(
        "the list is read before it is there",
        _GATHER,
        "      break;\n    }\n" + _BARRIER,
        "      break;\n    }\n",
        GATHER_NATIVE,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "an expert's tile is stored before it is there",
        _GATHER,
        "  " + _BARRIER + "      store_tile",
        "      store_tile",
        GATHER_NATIVE,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "an expert's list is written while it is read",
        _GATHER,
        _BARRIER + "  }\n}",
        "  }\n}",
        GATHER_NATIVE,
        Detector.RACE,
    ),
)

MUTANTS = (*_LIST, *_ROWS, *_WEIGHTS, *_FEW, *_WAITING)
"""Every bug of this file."""
