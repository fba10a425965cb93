"""Whether a model is faster with packed weights, by the times of its products."""

from collections.abc import Sequence
from typing import cast

from mlx_marlin.lm.race.model_products import ModelProduct
from mlx_marlin.lm.race.product_race import ProductRace
from mlx_marlin.measure import timing
from mlx_marlin.planning.gather_plan import AnyProblem
from mlx_marlin.planning.measurement import STOCK

PACKED_ROWS = (2, 4, 5, 8)
"""Rows at which packed weights must be faster by `PACKED_GAIN` in all."""
PACKED_GAIN = 0.05


def faster_layout(race: ProductRace, products: Sequence[ModelProduct]) -> str | None:
    """Returns the layout with which a model is faster, or None if that is not known.

    Weights are packed only if the sum over the products gains `PACKED_GAIN` at
    `PACKED_ROWS`, and one row is not slower by more than `timing.DRAW`.

    Args:
        race: The race of the products.
        products: The products.
    """
    native, packed = 0.0, 0.0
    for m in (1, *PACKED_ROWS):
        times = [_layout_times(race, product, m) for product in products]
        known = [pair for pair in times if pair is not None]
        if not known or len(known) < len(times):
            return None
        sums = sum(pair[0] for pair in known), sum(pair[1] for pair in known)
        if m == 1 and sums[1] > (1 + timing.DRAW) * sums[0]:
            return "mlx"
        if m > 1:
            native, packed = native + sums[0], packed + sums[1]
    return "marlin" if packed <= (1 - PACKED_GAIN) * native else "mlx"


def _layout_times(
    race: ProductRace, product: ModelProduct, m: int
) -> tuple[float, float] | None:
    """Returns the times of all layers in MLX's layout and packed, or None."""
    native, packed = (
        race.known.get(cast(AnyProblem, product.problem(m, layout)))
        for layout in ("mlx", "marlin")
    )
    if packed is None or packed.us is None or STOCK not in packed.medians_us:
        return None
    times = [packed.medians_us[STOCK]]
    if native is not None and native.us is not None:
        times.append(native.us)
    count = len(product.layers)
    return count * min(times), count * packed.us
