"""How many cores each strategy keeps busy over the predicted time."""

from collections.abc import Sequence

from mlx_marlin.cli.pictures.charts import Chart, Mark, Series
from mlx_marlin.cli.pictures.text import fullest, schedule
from mlx_marlin.planning.choice import Choice


def charts(choices: Sequence[Choice]) -> list[Chart]:
    """Returns a chart for each plan; all have the same axes.

    The further dispatches of a plan are part of its time, but not of its area, because
    the model does not assign them to cores.
    """
    us = max(choice.prediction.seconds for choice in choices) * 1e6
    return [
        Chart(
            title=_title(choice),
            x="us (predicted)",
            y="busy cores",
            ends=(us, choice.device.cores),
            series=(
                Series(name="busy", marks=_marks(choice), style="area", color=color),
            ),
        )
        for color, choice in enumerate(choices)
    ]


def _title(choice: Choice) -> str:
    prediction = choice.prediction
    title = f"{choice.plan.strategy}: {prediction.seconds * 1e6:.1f} us (predicted)"
    if not prediction.dispatch:
        return title
    us = f"{prediction.dispatch * 1e6:.1f} us (predicted)"
    return f"{title}, {us} in more dispatches"


def _marks(choice: Choice) -> tuple[Mark, ...]:
    """Returns the number of busy cores from each time on at which it changes."""
    bars = schedule(choice.plan, choice.device.cores)
    prediction = choice.prediction
    first_us = (prediction.seconds - prediction.dispatch) * 1e6
    scale = first_us / fullest(choice, bars)
    ends = {bar.core: bar.end * scale for bar in bars if bar.pieces}
    return tuple(
        Mark(time, float(sum(end > time for end in ends.values())))
        for time in sorted({0.0, *ends.values()})
    )
