"""What a race has found, in a line: who serves which numbers of rows."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from mlx_marlin.lm.race.model_products import ModelProduct
from mlx_marlin.lm.race.product_race import ProductRace
from mlx_marlin.planning.measurement import STOCK, Forwards, Result


def served(race: ProductRace, products: Sequence[ModelProduct], kept: Forwards) -> str:
    """Returns at which rows our kernels serve a model's products, and the gain."""
    ratios: dict[int, float | None] = {}
    for m in sorted({1, *(m for each in products for m in race.rows(each))}):
        found = [
            (len(each.layers), result)
            for each in products
            if (problem := race.problem(each, m, kept.layout))
            and (result := race.known.get(problem))
        ]
        if found:
            ours = not all(result.stock for _, result in found)
            ratios[m] = _times_as_fast(found, kept.seconds.get(m)) if ours else None
    return verdict(ratios)


def _times_as_fast(
    found: Sequence[tuple[int, Result]], passes: tuple[float, float] | None
) -> float:
    """Returns how many times as fast rows are: whole passes, or else products."""
    if passes is not None:
        return passes[0] / passes[1]
    stock, ours = 0.0, 0.0
    for count, result in found:
        alone = result.us or 0.0
        other = result.medians_us.get(STOCK, alone)
        stock += count * other
        ours += count * (other if result.stock else alone)
    return stock / ours if ours else 1.0


def verdict(ratios: Mapping[int, float | None]) -> str:
    """Returns the rows that are ours, and how many times as fast they are.

    `ratios`: rows -> times as fast; None where stock MLX serves.
    """
    gains = [ratio for ratio in ratios.values() if ratio is not None]
    if not gains:
        return "stock MLX's at all rows"
    runs = [
        (is_ours, [m for m, _ in each])
        for is_ours, each in groupby(
            sorted(ratios.items()), key=lambda item: item[1] is not None
        )
    ]
    named = " and ".join(
        f"{run[0]} to {run[-1]}" if run[1:] else str(run[0])
        for is_ours, run in runs
        if is_ours
    )
    least, most = f"{min(gains):.1f}", f"{max(gains):.1f}"
    times = f"{least} to {most} times" if least != most else f"{most} times"
    ends = [is_ours for is_ours, _ in runs]
    known = {(True,): "", (True, False): ", stock's beyond"}
    rest = known.get((*ends,), ", stock's elsewhere")
    return f"ours at {named} rows ({times}){rest}"


def slower(rows: Sequence[int], kept: Forwards) -> str:
    """Returns who serves rows at which the whole model was slower with ours."""
    if kept.stock_rows:
        served = "stock MLX serves them"
    elif kept.invariant:
        served = "they serve them all the same, since it is invariant"
    else:
        served = "packed weights stay, which stock MLX cannot read"
    listed = ", ".join(map(str, rows))
    return f"the whole model was slower with our kernels at {listed} rows: {served}"
