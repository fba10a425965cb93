"""Bugs in how the CUDA kernel for experts finds and places their rows."""

from mutant import Detector, Mutant

EXPERTS = "experts, blocks of experts"
PAIRS = "experts, blocks of pairs"
GATED = "experts, gate and up"

_GATHER = "cuda/gather.cuh"

MUTANTS = (
    Mutant(
        "gather: of an expert's pairs the first tile comes again",
        _GATHER,
        "((1u << lane_index) - 1)) - first",
        "((1u << lane_index) - 1))",
        EXPERTS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gather: an expert has no more pairs than a tile has rows",
        _GATHER,
        "first < found; first += TILE_M",
        "first < min(found, 1); first += TILE_M",
        EXPERTS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gather: pairs that chose another expert are listed",
        _GATHER,
        "experts[min(pair, count - 1)] == expert",
        "true",
        EXPERTS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gather: rows are those of pairs",
        _GATHER,
        "order.sources[order.pairs[row]]",
        "min(order.pairs[row], 4)",
        EXPERTS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gather: each pair has a row of its own",
        _GATHER,
        "uint(order.pairs[row]) / EACH",
        "uint(order.pairs[row]) % EACH",
        PAIRS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gather: a pair's block takes the pair for its expert",
        _GATHER,
        "BY_PAIR ? experts[own] : own",
        "own",
        PAIRS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gather: all blocks of an expert's pairs compute",
        _GATHER,
        "listed.first < int(own)",
        "listed.first > int(own)",
        PAIRS,
        Detector.RACE,
    ),
    Mutant(
        "gather: up's experts are gate's",
        _GATHER,
        "weight_tile<W>(second.w,",
        "weight_tile<W>(w,",
        GATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gather: up has the scales of gate",
        _GATHER,
        "second.scales, biases, col - one.n",
        "scales, biases, col - one.n",
        GATED,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "gather: warps multiply before the pairs are listed",
        _GATHER,
        "    __syncthreads();\n    work.m = min(found - first, TILE_M);",
        "    work.m = min(found - first, TILE_M);",
        EXPERTS,
        Detector.UNWRITTEN,
    ),
    Mutant(
        "gather: the next pairs are listed while results are stored",
        _GATHER,
        "SIMDGROUPS_K, warp, lane_index);\n    __syncthreads();",
        "SIMDGROUPS_K, warp, lane_index);",
        EXPERTS,
        Detector.RACE,
    ),
)
