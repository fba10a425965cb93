"""The seconds of a forward pass by its rows: measured, predicted or assumed."""

from bisect import bisect_left
from collections.abc import Mapping

import mlx.nn as nn

from mlx_marlin.lm.race.forward_race import FORWARDS, PREDICTED
from mlx_marlin.lm.report.model_report import report
from mlx_marlin.planning.measurement import Forwards

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
ASSUMED = 0.1
"""Cost of a further row relative to a pass of one row, where nothing is known."""
SMOOTHING = 0.1
"""Weight of the latest observed pass."""


class PassCost:
    """The seconds of forward passes."""

    def __init__(self, seconds: Mapping[int, float], source: str) -> None:
        """Keeps the seconds by rows.

        `seconds`: rows -> seconds of a pass, of 1 row and of more.
        """
        self._rows = sorted(seconds)
        self._seconds = [seconds[m] for m in self._rows]
        self._observed: float | None = None
        self.source = source
        self.most_rows = self._rows[-1]
        self._table = [self._known(m) for m in range(self.most_rows + 1)]

    def seconds(self, rows: int) -> float:
        """Returns the seconds of a pass, between known rows on a straight line.

        What a pass of one row takes longer than was known, because of a long context
        or the host, is added for any number of rows. If it takes a part of that, so do
        all.
        """
        known = self._table[rows] if rows <= self.most_rows else self._known(rows)
        first, observed = self._seconds[0], self._observed
        if observed is None:
            return known
        return (
            known + observed - first if observed > first else known * observed / first
        )

    def observe(self, seconds: float) -> None:
        """Takes note of the seconds that one token took with plain decoding."""
        before = seconds if self._observed is None else self._observed
        self._observed = (1 - SMOOTHING) * before + SMOOTHING * seconds

    def _known(self, rows: int) -> float:
        index = min(max(bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        low, high = self._rows[index - 1 : index + 1]
        first, second = self._seconds[index - 1 : index + 1]
        return first + (second - first) * (rows - low) / (high - low)


def cost_of(model: nn.Module) -> PassCost:
    """Returns the cost of a model's forward passes."""
    measured: Forwards | None = getattr(model, FORWARDS, None)
    if measured is not None and {1, 2} <= measured.seconds.keys():
        return PassCost(measured.served, "measured")
    predicted = getattr(model, PREDICTED, None)
    if predicted is None:
        predicted = _predicted(model)
        object.__setattr__(model, PREDICTED, predicted)  # no parameter
    if predicted:
        return PassCost(predicted, "predicted")
    return PassCost({m: 1 + ASSUMED * (m - 1) for m in ROWS}, "assumed")


def _predicted(model: nn.Module) -> dict[int, float]:
    """Returns the predicted seconds of a model's products; empty if one has none."""
    seconds = dict.fromkeys(ROWS, 0.0)
    for layer in report(model, ROWS).layers:
        for decision in layer.decisions:
            if decision.time is None:
                return {}
            seconds[decision.rows] += len(layer.use.paths) * decision.time.us * 1e-6
    return seconds if all(seconds.values()) else {}
