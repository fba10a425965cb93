"""Which part of a product a split computes."""

from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.work.tiles import Split


def product_of(plan: Plan, tile: int) -> int:
    """Returns the index in the batch of the product that a tile belongs to."""
    return tile // (plan.m_tiles * plan.n_tiles)


def k_range(plan: Plan, split: Split) -> tuple[int, int]:
    """Returns the range [start, stop) of k of a split."""
    stop = (split.k_idx + split.k_tile_count) * plan.tile.k
    return split.k_idx * plan.tile.k, min(stop, plan.problem.k)
