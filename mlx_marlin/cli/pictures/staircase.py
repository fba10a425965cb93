"""The staircase: the time of a product against the number of rows.

A kernel computes rows in fragments, so its time rises in steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from mlx_marlin.backends import planner
from mlx_marlin.cli.pictures.charts import Chart, Mark, Series, can_draw
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.problem import Problem

MOST_ROWS = 64
"""Rows of a chart that the model draws; one with more is logarithmic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The time of a product with some rows."""

    rows: int  # Rows of x
    seconds: float  # The time
    name: str  # What computes it
    source: str  # "measured", "predicted" or another word for where the time comes from


def predicted(
    problem: Problem, device: PlanningDevice, **overrides: Unpack[PlanOverrides]
) -> Iterator[Sample]:
    """Yields the times of the cost model for 1 to `MOST_ROWS` rows."""
    for rows in range(1, MOST_ROWS + 1):
        try:
            choice = planner.compare(
                replace(problem, m=rows), device=device, **overrides
            )
        except ValueError:
            continue
        times = {"ours": choice.prediction.seconds}
        if choice.stock is not None:
            times["stock MLX"] = choice.stock.seconds
        for name, seconds in times.items():
            yield Sample(rows=rows, seconds=seconds, name=name, source="predicted")


def chart(title: str, samples: Sequence[Sample]) -> Chart | None:
    """Returns the chart of times of one product."""
    drawn = [
        sample
        for sample in samples
        if can_draw(sample.rows, _microseconds(sample)) and sample.rows >= 1
    ]
    rows = sorted({sample.rows for sample in drawn})
    if len(rows) < 2:
        return None
    return Chart(
        title=title,
        x="rows",
        y="time of the product, us",
        log_base=2 if rows[-1] > MOST_ROWS else None,
        series=tuple(_series(drawn)),
    )


def _microseconds(sample: Sample) -> float:
    return sample.seconds * 1e6


def _series(samples: Sequence[Sample]) -> Iterator[Series]:
    names = list(dict.fromkeys(sample.name for sample in samples))
    groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for sample in samples:
        points = groups.setdefault((sample.name, sample.source), [])
        points.append((sample.rows, _microseconds(sample)))
    for (name, source), points in groups.items():
        shortest = dict(sorted(points, reverse=True))  # the last of the same rows stays
        yield Series(
            name=f"{name} ({source})",
            marks=tuple(Mark(*point) for point in sorted(shortest.items())),
            style="line",
            is_measured=source == "measured",
            color=names.index(name),
        )
