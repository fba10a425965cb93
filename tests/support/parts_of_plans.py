"""Which part of a product a split computes."""

from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.work.tiles import Split, tile_position


def product_of(plan: Plan, tile: int) -> int:
    """Returns the index in the batch of the product that a tile belongs to."""
    return tile // (plan.m_tiles * plan.n_tiles)


def k_range(plan: Plan, split: Split) -> tuple[int, int]:
    """Returns the range [start, stop) of k of a split."""
    stop = (split.k_idx + split.k_tile_count) * plan.tile.k
    return split.k_idx * plan.tile.k, min(stop, plan.problem.k)


def corner(plan: Plan, tile: int) -> tuple[int, int]:
    """Returns the first row and the first column of a tile in its product."""
    row, column = tile_position(tile, plan.m_tiles)
    column %= plan.n_tiles
    wide = min(column, plan.wide_columns)
    return row * plan.tile.m, wide * plan.wide_n + (column - wide) * plan.tile.n
