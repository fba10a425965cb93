"""Tiles, splits and the sizes that all back ends share."""

from dataclasses import dataclass
from typing import Literal

from mlx_marlin.weights.formats import TILE_K, TILE_N

Kernel = str
"""Name of a kernel; every back end defines its own names."""
Reduction = Literal["none", "workspace", "atomic"]
REDUCTIONS: tuple[Reduction, ...] = ("none", "workspace", "atomic")
FRAGMENT = 8
"""Rows and columns of a simdgroup matrix."""
SIMD_WIDTH = 32
"""Threads of a simdgroup."""
PADDED_COLUMNS = TILE_N + 4
"""Floats per row of the epilogue's scratch; 4 are padding against bank conflicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Size of a tile: m rows x n columns of the result, and the k of one k tile."""

    m: int
    n: int = TILE_N
    k: int = TILE_K

    def __post_init__(self) -> None:
        if self.m < 1 or self.n < 1 or self.k < 1 or self.n % 8 or self.k % 8:
            raise ValueError(
                f"a tile needs m >= 1 and positive multiples of 8 for n and k, "
                f"got {self}"
            )

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The part of one tile that one threadgroup computes."""

    tile: int  # Number of the tile, in column-major order
    k_idx: int  # First k tile of the split
    k_tile_count: int  # Number of k tiles of the split
    k_tiles: int  # Number of k tiles of the whole tile
    slot: int  # Index of the split among those of its tile, in ascending k

    @property
    def requires_fixup(self) -> bool:
        """Whether other splits of the tile must be added to this one."""
        return self.k_tile_count != self.k_tiles


def tile_position(tile: int, m_tiles: int) -> tuple[int, int]:
    """Returns the (row, column) of a tile in column-major order."""
    return tile % m_tiles, tile // m_tiles


def k_tile(group_size: int) -> int:
    """Returns the k values of a k tile, the granularity at which k may be cut.

    Each iteration of the main loop applies the scales of its own group, so a cut may
    fall inside a group. Groups longer than 128, and whole rows, are therefore cut as
    finely as short ones.
    """
    return 128 if group_size == 128 else TILE_K


def step_k(group_size: int) -> int:
    """Returns the k values of a step; a fragment of a step must not span two groups."""
    return 32 if group_size == 32 else TILE_K
