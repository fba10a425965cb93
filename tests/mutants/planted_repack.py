"""Bugs in moving codes between MLX's rows and packed tiles."""

from mutants.function_cases import REPACK_OFFSETS
from mutants.mutant import Detector, Mutant
from mutants.repack_cases import (
    PACK_FOUR,
    PACK_ONE,
    PACK_THREE,
    UNPACK_FIVE,
    UNPACK_FOUR,
    UNPACK_SIX,
)

_REPACK = "lib/repack"
_BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"
_TILES = "  for (uint i = thread_index; i < run.tiles * C::TILE;"
_ROWS = "  for (uint i = thread_index; i < TILE_N * C::ROWS;"

_PACK = (
    Mutant(
        "rows of a batch lie within 32 bits of the first",
        _REPACK,
        "(ulong(position.z) * n + first_row)",
        "(position.z * n + first_row)",
        REPACK_OFFSETS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "tiles of a batch lie within 32 bits of the first",
        _REPACK,
        "((ulong(position.z) * n_tiles + position.y)",
        "((position.z * n_tiles + position.y)",
        REPACK_OFFSETS,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a high plane is filled with low bits",
        _REPACK,
        "* C::BITS + P::FIRST",
        "* C::BITS",
        PACK_THREE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "neighbouring codes of a packed word change places",
        _REPACK,
        "(code & P::MASK) << P::BITS * i",
        "(code & P::MASK) << P::BITS * (i ^ 1)",
        PACK_ONE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a packed word's codes are all of one row",
        _REPACK,
        "gathered<P::ROW, 5>(place | i)",
        "gathered<P::ROW, 5>(place)",
        PACK_ONE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a packed word's codes are all of one k",
        _REPACK,
        "gathered<P::K, 6>(place | i)",
        "gathered<P::K, 6>(place)",
        PACK_THREE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a code that crosses words loses its upper bits when packed",
        _REPACK,
        "if (bit % 32 + P::BITS > 32) {",
        "if (bit % 32 + P::BITS > 33) {",
        PACK_THREE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a plane keeps a bit of the next",
        _REPACK,
        "MASK = (1u << BITS_) - 1",
        "MASK = (2u << BITS_) - 1",
        PACK_THREE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the first word of the high plane is a low one",
        _REPACK,
        "word < C::LOW_TILE",
        "word <= C::LOW_TILE",
        PACK_THREE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows past the last of a weight are read",
        _REPACK,
        "is_there = row < run.rows && word < run.words",
        "is_there = word < run.words",
        PACK_ONE,
        Detector.OUTSIDE,
    ),
    Mutant(
        "rows past the last of a weight are the next one's",
        _REPACK,
        "run.rows = min(n - first_row, uint(TILE_N));",
        "run.rows = position.z == 0 ? TILE_N : min(n - first_row, uint(TILE_N));",
        PACK_THREE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "codes past k are the next row's",
        _REPACK,
        "is_there = row < run.rows && word < run.words",
        "is_there = row < run.rows && word < run.words + (row < run.rows - 1 ? 1 : 0)",
        PACK_ONE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "words are packed before all rows are there",
        _REPACK,
        _BARRIER + _TILES,
        _TILES,
        PACK_FOUR,
        Detector.TOO_EARLY,
    ),
    Mutant(
        "rows begin in the same bank",
        _REPACK,
        "STRIDE = ROWS + 1",
        "STRIDE = ROWS",
        PACK_FOUR,
        Detector.COUNTERS,
    ),
    Mutant(
        "two threadgroups move the same tiles",
        _REPACK,
        "const uint first_tile = position.x * C::TILES;",
        "const uint first_tile = position.x * C::TILES / 2;",
        PACK_FOUR,
        Detector.RACE,
    ),
)

_UNPACK = (
    Mutant(
        "a high plane is read where the low one is",
        _REPACK,
        "(tile + C::LOW_TILE, row, k)",
        "(tile, row, k)",
        UNPACK_SIX,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a high plane's bits lie over the low ones",
        _REPACK,
        "& P::MASK) << P::FIRST",
        "& P::MASK)",
        UNPACK_FIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a row is looked for in another sequence of bits",
        _REPACK,
        "scattered<P::ROW, 5>(row) |",
        "scattered<P::ROW, 5>(row ^ 8) |",
        UNPACK_FOUR,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "a code that begins in the word before is left out",
        _REPACK,
        "bit < 0 ? code >> -bit : code << bit",
        "bit < 0 ? 0 : code << bit",
        UNPACK_FIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "the last code of a word is left out",
        _REPACK,
        "(30 + 2 * C::BITS) / C::BITS",
        "32 / C::BITS",
        UNPACK_FIVE,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows past the last of a weight are written",
        _REPACK,
        "    if (row < run.rows && word < run.words) {",
        "    if (word < run.words) {",
        UNPACK_FIVE,
        Detector.OUTSIDE,
    ),
    Mutant(
        "words past the end of a row are written",
        _REPACK,
        "    if (row < run.rows && word < run.words) {",
        "    if (row < run.rows) {",
        UNPACK_FIVE,
        Detector.UNWRITTEN,
    ),
    Mutant(
        "tiles past the last one are read",
        _REPACK,
        "run.tiles = min(k_tiles - first_tile, uint(C::TILES));",
        "run.tiles = C::TILES;",
        UNPACK_SIX,
        Detector.OUTSIDE,
    ),
    Mutant(
        "all weights of a batch are the first",
        _REPACK,
        "((ulong(position.z) * n_tiles + position.y)",
        "((ulong(0) * n_tiles + position.y)",
        UNPACK_SIX,
        Detector.WRONG_RESULT,
    ),
    Mutant(
        "rows are written before all words are there",
        _REPACK,
        _BARRIER + _ROWS,
        _ROWS,
        UNPACK_FOUR,
        Detector.TOO_EARLY,
    ),
)

MUTANTS = (*_PACK, *_UNPACK)
"""Every bug of this file."""
