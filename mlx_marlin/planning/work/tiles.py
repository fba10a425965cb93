"""Sizes that all back ends' tiles are made of."""

from typing import Literal

from mlx_marlin.weights.formats import TILE_K, TILE_N

Kernel = str
"""Name of a kernel; each back end has its own."""
Reduction = Literal["none", "workspace", "atomic"]
REDUCTIONS: tuple[Reduction, ...] = ("none", "workspace", "atomic")
FRAGMENT = 8
"""Rows and columns of a simdgroup matrix."""
SIMD_WIDTH = 32
"""Threads of a simdgroup."""
PADDED_COLUMNS = TILE_N + 4
"""Columns of a float32 row of the epilogue's scratch: the 4 spread rows over banks."""


def k_tile(group_size: int) -> int:
    """Returns the weights of a k tile, between which k may be cut.

    Every trip applies its own group's scales, so a cut may fall inside a group: longer
    groups than 128, and whole rows, are cut as finely as short ones.
    """
    return 128 if group_size == 128 else TILE_K


def step_k(group_size: int) -> int:
    """Returns the k of a step: a fragment of a step must not sit in two groups."""
    return 32 if group_size == 32 else TILE_K
