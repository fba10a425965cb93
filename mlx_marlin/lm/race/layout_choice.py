"""Whether a model is faster with packed weights, by the times of its products."""

from collections.abc import Sequence
from typing import cast

from mlx_marlin.lm.race.forward_race import PROMPT, with_prompt
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
    `PACKED_ROWS`, one row is not slower by more than `timing.DRAW`, and a prompt with
    its answer is not slower, if prompts were timed.
    """
    rows = (1, *PACKED_ROWS, PROMPT // 2, PROMPT)
    sums = {m: pair for m in rows if (pair := _sums(race, products, m))}
    few = [m for m in PACKED_ROWS if m in sums]
    if 1 not in sums or not few:
        return None
    if sums[1][1] > (1 + timing.DRAW) * sums[1][0]:
        return "mlx"
    answered = with_prompt(sums)
    if answered is not None and answered[1] > answered[0]:
        return "mlx"
    native, packed = (sum(sums[m][i] for m in few) for i in (0, 1))
    return "marlin" if packed <= (1 - PACKED_GAIN) * native else "mlx"


def _sums(
    race: ProductRace, products: Sequence[ModelProduct], m: int
) -> tuple[float, float] | None:
    """Returns the times of all products in MLX's layout and packed, or None."""
    times = [_layout_times(race, each, m) for each in products if m in race.rows(each)]
    known = [pair for pair in times if pair is not None]
    if not known or len(known) < len(times):
        return None
    return sum(pair[0] for pair in known), sum(pair[1] for pair in known)


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
