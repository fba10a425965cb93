"""SVG and PNG pictures of plans, drawn with matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_marlin.cli.pictures import figures, files
from mlx_marlin.cli.pictures.axes import draw_map, draw_timeline
from mlx_marlin.cli.pictures.text import why_not_drawn
from mlx_marlin.planning.choice import Choice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PER_LINE = 3
"""Plans in a line of the picture."""

# Inches.
WIDTH = {1: 8.0, 2: 6.0, 3: 5.2}
"""Width of a plan, by the number of plans in a line."""
TOP = 0.5
TITLE = 0.75
MAP = 1.5
BETWEEN = 0.35
TIMELINE = 2.5
BELOW = 0.75
LEFT, RIGHT = 0.65, 0.25
HEIGHT = TITLE + MAP + BETWEEN + TIMELINE + BELOW


def save(path: Path, choices: Sequence[Choice]) -> None:
    """Draws the tiles and the timeline of plans of one product to a file.

    The same plans give the same bytes. An existing file is replaced atomically.

    Args:
        path: The file; its suffix, .svg or .png, selects the format.
        choices: The plans, at least one.

    Raises:
        ValueError: If the file has another suffix, its folder does not exist, or a plan
            has too many threadgroups.
        ImportError: If matplotlib is missing.
        OSError: If the file cannot be written.
    """
    files.check(path, "--save")
    for choice in choices:
        if too_large := why_not_drawn(choice.plan):
            raise ValueError(f"--save {path}: {too_large}")
    figures.save(path, "--save", lambda: _figure(choices))


def _figure(choices: Sequence[Choice]) -> "Figure":
    from matplotlib.figure import Figure

    per_line = min(len(choices), PER_LINE)
    lines = -(-len(choices) // per_line)
    plan_width = WIDTH[per_line]
    width, height = per_line * plan_width, TOP + lines * HEIGHT
    figure = Figure(figsize=(width, height))
    first = choices[0]
    title = f"{first.plan.problem.explain()}\n{first.device.variant}"
    figure.text(LEFT / width, 1 - 0.1 / height, title, size=9, va="top")
    until = max(choice.prediction.seconds for choice in choices) * 1e6
    for index, choice in enumerate(choices):
        line, column = divmod(index, per_line)
        left = column * plan_width + LEFT
        top = height - TOP - line * HEIGHT
        _draw_plan(figure, choice, until, (left, top, plan_width - LEFT - RIGHT))
    return figure


def _draw_plan(
    figure: "Figure", choice: Choice, until: float, position: tuple[float, float, float]
) -> None:
    """Draws a plan.

    Args:
        figure: The figure.
        choice: The plan.
        until: End of the time axis in microseconds.
        position: Left and upper border and width, in inches from the lower left corner.
    """
    left, top, width = position
    figure_width, figure_height = figure.get_size_inches()
    x = left / figure_width

    def axes(upper: float, height: float) -> "Axes":
        bottom = (upper - height) / figure_height
        return figure.add_axes(
            (x, bottom, width / figure_width, height / figure_height)
        )

    under = top - TITLE
    strategy = choice.plan.strategy
    figure.text(x, (under + 0.4) / figure_height, strategy, size=11, weight="bold")
    figure.text(x, (under + 0.22) / figure_height, _subtitle(choice), size=8)
    draw_map(axes(under, MAP), choice.plan, (width, MAP))
    draw_timeline(axes(under - MAP - BETWEEN, TIMELINE), choice, until, width)


def _subtitle(choice: Choice) -> str:
    work, prediction = choice.plan.work, choice.prediction
    return (
        f"{prediction.seconds * 1e6:.1f} us (model, not measured), "
        f"{work.threadgroups} threadgroups, {work.idle} idle, "
        f"{choice.plan.dispatches} "
        f"{'dispatch' if choice.plan.dispatches == 1 else 'dispatches'}"
    )
