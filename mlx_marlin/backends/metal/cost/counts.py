"""Counted cost of an iteration of the main loop besides its matrix products, by format.

The counts are those of an open compiler for the first Apple generation. They rank
variants; Apple's compiler may give others. An iteration is 64 k of 32 rows of w.
"""

from dataclasses import dataclass
from functools import lru_cache

from mlx_marlin.weights.formats import format_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCost:
    """Counts of one format, with float16 activations.

    Attributes:
        fragments: Issue slots besides the matrix products, by row fragments of x (1, 2)
            and by whether the offset is subtracted.
        rows: Issue slots of the dot products: fixed, and per row.
        row_subtract: Additional slots of the dot products if the offset is subtracted.
        registers: 16-bit registers of a thread, by row fragments of x.
        row_registers: 16-bit registers of the dot products: fixed, and per row.
    """

    fragments: tuple[tuple[int, int], tuple[int, int]]
    rows: tuple[int, int]
    row_subtract: int
    registers: tuple[int, int]
    row_registers: tuple[int, int]


ROW_SUBTRACT = {
    "affine": 60,
    "zero_point": 60,
    "symmetric": 48,
    "floating": 0,
    "k_affine": 60,
    "k_symmetric": 48,
    "codebook": 0,
    "k_codebook": 0,
}
"""Additional slots of the dot products if the offset is subtracted, by codes."""

# fmt: off
_COUNTED: dict[
    tuple[str, int, int, bool],
    tuple[
        tuple[int, int], tuple[int, int], tuple[int, int], int, int, tuple[int, int]
    ],
] = {
    ("affine", 1, 64, True): ((162, 224), (226, 286), (100, 92), 80, 128, (38, 29)),
    ("affine", 1, 64, False): ((181, 243), (249, 305), (117, 92), 92, 136, (49, 30)),
    ("affine", 2, 64, True): ((160, 222), (226, 284), (98, 92), 84, 128, (44, 29)),
    ("affine", 2, 64, False): ((167, 229), (236, 291), (105, 92), 96, 138, (52, 29)),
    ("affine", 3, 64, True): ((262, 324), (329, 377), (201, 92), 90, 132, (49, 28)),
    ("affine", 3, 64, False): ((216, 278), (280, 340), (140, 92), 108, 152, (60, 28)),
    ("affine", 4, 64, True): ((159, 221), (226, 283), (97, 92), 94, 136, (52, 28)),
    ("affine", 4, 64, False): ((163, 225), (232, 287), (104, 92), 104, 146, (63, 29)),
    ("affine", 5, 64, True): ((263, 325), (328, 376), (204, 92), 98, 140, (57, 28)),
    ("affine", 5, 64, False): ((254, 316), (325, 386), (184, 92), 118, 166, (70, 28)),
    ("affine", 6, 64, True): ((253, 319), (325, 383), (193, 92), 104, 144, (65, 28)),
    ("affine", 6, 64, False): ((224, 286), (288, 348), (155, 92), 112, 160, (75, 28)),
    ("affine", 8, 64, True): ((169, 233), (231, 291), (109, 92), 104, 156, (69, 27)),
    ("affine", 8, 64, False): ((211, 286), (281, 335), (150, 90), 120, 162, (79, 27)),
    ("symmetric", 2, 64, True): ((152, 182), (208, 204), (97, 88), 80, 128, (38, 29)),
    ("symmetric", 3, 64, True): ((254, 284), (316, 297), (199, 88), 86, 128, (43, 29)),
    ("symmetric", 4, 64, True): ((151, 181), (207, 215), (96, 88), 90, 136, (44, 29)),
    ("symmetric", 5, 64, True): ((255, 285), (315, 296), (202, 88), 94, 136, (52, 28)),
    ("symmetric", 6, 64, True): ((245, 275), (307, 313), (192, 88), 96, 144, (59, 29)),
    ("symmetric", 8, 64, True): ((159, 189), (229, 211), (108, 88), 104, 144, (60, 28)),
    ("zero_point", 2, 64, True): ((164, 226), (230, 288), (102, 92), 84, 128, (43, 29)),
    ("zero_point", 3, 64, True): ((266, 328), (333, 381), (204, 92), 90, 132, (50, 27)),
    ("zero_point", 4, 64, True): ((163, 225), (230, 287), (101, 92), 94, 136, (52, 28)),
    ("zero_point", 5, 64, True): ((267, 329), (332, 380), (208, 92), 98, 140, (57, 28)),
    ("zero_point", 6, 64, True): ((257, 323), (329, 387), (197, 92), 104, 144, (68, 27)),
    ("zero_point", 8, 64, True): ((173, 237), (235, 295), (113, 92), 104, 156, (67, 27)),
    ("floating", 4, 32, True): ((272, 272), (308, 308), (190, 80), 72, 104, (41, 17)),
    ("floating", 4, 32, False): ((286, 286), (318, 318), (202, 80), 84, 120, (52, 16)),
    ("floating", 8, 32, True): ((264, 264), (296, 296), (189, 79), 78, 112, (46, 17)),
    ("floating", 8, 32, False): ((318, 318), (350, 350), (234, 80), 92, 128, (58, 16)),
    ("floating", 4, 16, True): ((266, 266), (295, 295), (176, 72), 96, 136, (52, 25)),
    ("floating", 4, 16, False): ((280, 280), (332, 332), (192, 72), 110, 144, (72, 24)),
    ("affine", 1, 32, True): ((212, 272), (318, 368), (113, 106), 70, 104, (41, 18)),
    ("affine", 1, 32, False): ((246, 306), (346, 402), (147, 105), 84, 124, (50, 19)),
    ("affine", 2, 32, True): ((210, 270), (318, 372), (116, 104), 72, 104, (41, 19)),
    ("affine", 2, 32, False): ((246, 306), (346, 402), (147, 105), 84, 124, (50, 19)),
    ("affine", 3, 32, True): ((312, 372), (419, 471), (217, 104), 74, 104, (45, 18)),
    ("affine", 3, 32, False): ((288, 348), (388, 444), (193, 105), 86, 124, (57, 19)),
    ("affine", 4, 32, True): ((208, 268), (312, 364), (112, 104), 76, 112, (43, 19)),
    ("affine", 4, 32, False): ((218, 278), (318, 374), (118, 107), 86, 124, (55, 18)),
    ("affine", 5, 32, True): ((314, 374), (415, 467), (219, 105), 80, 112, (47, 18)),
    ("affine", 5, 32, False): ((358, 418), (462, 518), (262, 103), 94, 128, (65, 19)),
    ("affine", 6, 32, True): ((305, 365), (427, 479), (212, 104), 82, 112, (52, 18)),
    ("affine", 6, 32, False): ((294, 354), (400, 454), (194, 104), 96, 128, (59, 19)),
    ("affine", 8, 32, True): ((216, 280), (338, 398), (126, 104), 84, 112, (50, 18)),
    ("affine", 8, 32, False): ((266, 330), (374, 422), (169, 103), 96, 128, (62, 18)),
    ("symmetric", 4, 32, True): ((188, 200), (272, 238), (110, 96), 72, 112, (38, 19)),
    ("affine", 1, 16, True): ((284, 284), (310, 310), (100, 92), 96, 158, (38, 29)),
    ("affine", 2, 16, True): ((282, 282), (308, 308), (98, 92), 100, 158, (44, 29)),
    ("affine", 3, 16, True): ((384, 384), (419, 419), (201, 92), 104, 156, (49, 28)),
    ("affine", 4, 16, True): ((293, 293), (307, 307), (97, 92), 106, 168, (52, 28)),
    ("affine", 5, 16, True): ((385, 385), (411, 411), (204, 92), 118, 172, (57, 28)),
    ("affine", 6, 16, True): ((378, 378), (401, 401), (193, 92), 120, 172, (65, 28)),
    ("affine", 8, 16, True): ((292, 292), (326, 326), (109, 92), 120, 186, (69, 27)),
    ("codebook", 4, 64, True): ((249, 249), (275, 275), (225, 70), 104, 160, (60, 26)),
    ("codebook", 4, 32, True): ((274, 274), (318, 318), (244, 74), 84, 128, (47, 20)),
    ("codebook", 4, 16, True): ((325, 325), (342, 342), (225, 70), 104, 160, (60, 26)),
    ("k_codebook", 4, 32, True): ((312, 312), (388, 388), (286, 71), 92, 128, (43, 16)),
}
# fmt: on
"""By (codes, bits, group size: 16, 32, or 64 for all larger ones, packed): slots of 1
and of 2 fragments (plain, subtracting), slots of rows (fixed, per row), registers of 1
and of 2 fragments, registers of rows (fixed, per row). Integers in groups of 16 have
the dot products of groups of 64 and float32 fragments, as codebooks have."""


@lru_cache
def loop_cost(mode: str, bits: int, group_size: int, layout: str) -> LoopCost:
    """Returns the counts of a format, or of the affine one if it was not counted.

    Args:
        mode: Quantization mode, such as "affine".
        bits: Bits of a code.
        group_size: Weights that share a scale.
        layout: "mlx" or "marlin".
    """
    codes, packed = format_of(mode, bits).codes, layout == "marlin"
    group = min(group_size, 64)
    keys = (
        (kind, bits, group, packed)
        for kind in (codes, codes.removeprefix("k_"), "affine")
    )
    key = next(key for key in keys if key in _COUNTED)
    one, two, rows, least, most, row_registers = _COUNTED[key]
    return LoopCost(
        fragments=(one, two),
        rows=rows,
        row_subtract=ROW_SUBTRACT[codes],
        registers=(least, most),
        row_registers=row_registers,
    )
