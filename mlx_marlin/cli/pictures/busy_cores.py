"""How many cores each strategy keeps busy over the predicted time."""

from collections.abc import Sequence

from mlx_marlin.cli.pictures.charts import Chart, Mark, Series, axis_from_zero
from mlx_marlin.cli.pictures.text import fullest, schedule
from mlx_marlin.planning.choice import Choice


def charts(choices: Sequence[Choice]) -> list[Chart]:
    """Returns a chart for each plan; all have the same axes.

    The further dispatches of a plan are part of its time, but not of its area, because
    the model does not assign them to cores.

    Args:
        choices: Plans of one product for one device, at least one.
    """
    all_marks = [_marks(choice) for choice in choices]
    seconds = [choice.prediction.seconds for choice in choices]
    ends = [marks[-1].x for marks in all_marks]
    x = axis_from_zero("us (predicted)", [*ends, max(seconds) * 1e6])
    y = axis_from_zero("busy cores", [choices[0].device.cores])
    return [
        Chart(
            title=_title(choice),
            x=x,
            y=y,
            series=(Series(name="busy", marks=marks, style="area", color=color),),
        )
        for color, (choice, marks) in enumerate(zip(choices, all_marks, strict=True))
    ]


def _title(choice: Choice) -> str:
    prediction = choice.prediction
    title = f"{choice.plan.strategy}: {prediction.seconds * 1e6:.1f} us"
    if prediction.dispatch:
        title += f", {prediction.dispatch * 1e6:.1f} us of it in further dispatches"
    return f"{title} (predicted)"


def _marks(choice: Choice) -> tuple[Mark, ...]:
    """Returns the number of busy cores from each time on at which it changes."""
    bars = schedule(choice.plan, choice.device.cores)
    prediction = choice.prediction
    first_us = (prediction.seconds - prediction.dispatch) * 1e6
    scale = first_us / fullest(choice, bars)
    ends: dict[int, float] = {}
    for bar in bars:
        if bar.pieces:
            ends[bar.core] = bar.end * scale
    marks = [Mark(x=0.0, y=float(len(ends)))]
    for end in sorted({*ends.values()}):
        busy = sum(other > end for other in ends.values())
        marks.append(Mark(x=end, y=float(busy)))
    return tuple(marks)
