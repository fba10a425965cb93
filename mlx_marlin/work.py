"""Tiles, units and runs: the pieces of a product, in the words of `work.metal`."""

from dataclasses import dataclass

from mlx_marlin.formats import TILE_K, TILE_N


def run_balanced(units: int, threadgroups: int, index: int) -> tuple[int, int]:
    """Returns the units [begin, end) of a threadgroup; sizes differ by at most 1."""
    return index * units // threadgroups, (index + 1) * units // threadgroups


def run_ceil(units: int, threadgroups: int, index: int) -> tuple[int, int]:
    """Returns the units [begin, end) of a threadgroup as Marlin stripes cut them.

    Every run has ceil(units / threadgroups) units, so the last ones can be idle.
    """
    size = -(-units // threadgroups)
    begin = min(index * size, units)
    return begin, min(begin + size, units)


def tile_position(tile: int, m_tiles: int) -> tuple[int, int]:
    """Returns (row, column) of a tile that is numbered down the columns first."""
    return tile % m_tiles, tile // m_tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What a threadgroup computes at a time: m rows x n columns, k steps a trip."""

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
class Unit:
    """One slice of k of one tile; `k_start` to `k_stop` counts weights along k."""

    tile_row: int
    tile_col: int
    split: int
    k_start: int
    k_stop: int
