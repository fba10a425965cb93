"""Issue slots of stock MLX's kernels by format, and what a slot takes of them.

The counts are those of an open compiler for the first Apple generation and the kernels
of MLX 0.32.4, with float16 activations. Apple's compiler may give others.
"""

from dataclasses import dataclass

from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.problem import Problem

TILE_WEIGHTS = 1024
"""Weights of a tile of the matrix kernels: 32 rows of w x 32 k, by four simdgroups."""
TILE_SIMDGROUPS = 4
SLOWER_BYTES = 1.09
"""Factor on issue slots and loads of affine codes of 8 bits on M3 and M4 (fit: M4 Pro,
chains)."""
EXPOSED_VECTOR = {"M3": 1.3, "M4": 1.3, "M5": 1.75}
"""Factor on the slots of affine codes in `qmv_fast` and `qmv`, whose integer and float
instructions overlap in part. One row of few bits shows it, which reading does not hide
(fit: M4 Pro, 2 bits; assumed: M3; M5 Max: 250 to 420 of 614 GB/s with 2 bits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockSlots:
    """Issue slots per weight of one format."""

    vector: float  # `qmv_fast`, for one row
    wide: tuple[float, ...]  # `qmv_wide`, for 2, 3, 4 and 5 rows
    tile: float  # The matrix kernels, for 32 rows, without 8x8 products


def _counted(
    weights: int, vector: int, wide_weights: int, wide: tuple[int, ...], tile: int
) -> StockSlots:
    """Returns the slots per weight from those of an iteration of each main loop."""
    return StockSlots(
        vector=vector / weights,
        wide=tuple(slots / wide_weights for slots in wide),
        tile=TILE_SIMDGROUPS * tile / TILE_WEIGHTS,
    )


_COUNTED = {
    ("affine", 1): _counted(4096, 467, 2048, (475, 558, 641, 724), 127),
    ("affine", 2): _counted(2048, 256, 2048, (471, 554, 637, 720), 123),
    ("affine", 3): _counted(2048, 320, 2048, (700, 708, 769, 852), 131),
    ("affine", 4): _counted(2048, 256, 2048, (469, 552, 635, 718), 121),
    ("affine", 5): _counted(2048, 384, 2048, (828, 836, 882, 965), 135),
    ("affine", 6): _counted(1024, 192, 2048, (824, 832, 866, 949), 140),
    ("affine", 8): _counted(1024, 128, 2048, (365, 448, 531, 614), 104),
    ("mxfp4", 4): _counted(2048, 472, 1024, (275, 312, 349, 386), 168),
    ("mxfp8", 8): _counted(1024, 432, 1024, (428, 465, 502, 539), 180),
    ("nvfp4", 4): _counted(2048, 496, 512, (154, 175, 196, 217), 172),
}
"""By mode and bits: weights and slots of an iteration of `qmv_fast`, the same for
`qmv_wide`, and slots of a simdgroup per tile. The tile slots of affine 4-bit were
counted for the whole kernel, the others by the difference of the loader of w."""


def vector_slots(problem: Problem, device: Device) -> float:
    """Returns the slots per weight of the vector kernels for one row."""
    slots = stock_slots(problem).vector
    if problem.format.codes == "floating":
        return slots
    return slots * EXPOSED_VECTOR.get(device.generation, 1.0)


def stock_slots(problem: Problem) -> StockSlots:
    """Returns the slots of a format, or of the affine one if MLX does not have it."""
    key = (problem.mode, problem.bits)
    return _COUNTED.get(key) or _COUNTED["affine", problem.bits]
