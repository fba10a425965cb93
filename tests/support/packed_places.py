"""Which weight lies at a place of the packed layout."""

from functools import cache
from itertools import product

from mlx_marlin.weights.formats import TILE_K, TILE_N
from mlx_marlin.weights.layout import position_of_weight

Place = tuple[int, int]


@cache
def weights_of_tile(bits: int, order: str) -> dict[Place, Place]:
    """Returns the (row, k) of each (word, lowest bit) of a plane of a tile."""
    weights = product(range(TILE_N), range(TILE_K))
    options = {"bits": bits, "order": order, "k_tiles": 1}
    return {position_of_weight(*each, **options): each for each in weights}
