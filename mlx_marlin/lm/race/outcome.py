"""What the times of a race say: which layout is faster, and who serves which rows."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import cast

from mlx_marlin.lm.race.product_race import ProductRace
from mlx_marlin.lm.report.layer_uses import LayerUse
from mlx_marlin.measure import timing
from mlx_marlin.planning.gather_plan import AnyProblem
from mlx_marlin.planning.measurement import STOCK, Forwards, Result

PROMPT, DECODED = 512, 256
"""Tokens of a prompt and of an answer, by whose time packed weights are judged."""
PACKED_ROWS = (2, 4, 5, 8)
"""Rows at which packed weights must be faster by `PACKED_GAIN` in all."""
PACKED_GAIN = 0.05
FEW = 8
"""Rows of forward passes by whose sum a packed model is judged."""


def faster_layout(race: ProductRace, products: Sequence[LayerUse]) -> str | None:
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
    race: ProductRace, products: Sequence[LayerUse], m: int
) -> tuple[float, float] | None:
    """Returns the times of all products in MLX's layout and packed, or None."""
    times = [_layout_times(race, each, m) for each in products if m in race.rows(each)]
    known = [pair for pair in times if pair is not None]
    if not known or len(known) < len(times):
        return None
    return sum(pair[0] for pair in known), sum(pair[1] for pair in known)


def _layout_times(
    race: ProductRace, product: LayerUse, m: int
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


def loses_packed(found: Mapping[int, tuple[float, float]]) -> bool:
    """Returns whether forward passes of packed weights are slower than stock MLX's.

    They lose with few rows, or with a prompt and its answer.
    """
    few = [pair for m, pair in found.items() if m <= FEW]
    stock, ours = (sum(pair[i] for pair in few) for i in (0, 1))
    answered = with_prompt(found)
    return ours > stock or (answered is not None and answered[1] > answered[0])


def with_prompt(found: Mapping[int, tuple[float, float]]) -> tuple[float, float] | None:
    """Returns the seconds of a prompt of `PROMPT` tokens and `DECODED` further ones.

    Returns None if they are not known. Half the prompt, twice, stands for one that
    takes too long to be timed.
    """
    prompt, half = found.get(PROMPT), found.get(PROMPT // 2)
    if prompt is None and half is not None:
        prompt = 2 * half[0], 2 * half[1]
    one = found.get(1)
    if one is None or prompt is None:
        return None
    return prompt[0] + DECODED * one[0], prompt[1] + DECODED * one[1]


def served(race: ProductRace, products: Sequence[LayerUse], kept: Forwards) -> str:
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
    return stock / ours


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
