"""The seconds of a forward pass by its rows: known before, then as observed."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.nn as nn

from mlx_marlin.lm.race.forward_race import FORWARDS, PREDICTED
from mlx_marlin.lm.report.model_report import report
from mlx_marlin.planning.measurement import Forwards

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
ASSUMED = 0.1
"""Cost of a further row relative to a pass of one row, where nothing is known."""
COMMON = 0.1
"""Part of a surprise that is taken to concern all passes: heat, or a longer context."""
MEMORY = 16.0
"""Most passes that an estimate of their cost counts as."""
HALF = 512
"""Tokens after which a pass counts half: with the context, attention's share grows."""
LARGEST = 2.0
"""Most times the expected seconds that are believed, and as small a part: the host may
have been away, or a kernel compiled."""


@dataclass(slots=True)
class Seen:
    """Passes with a number of rows."""

    seconds: float  # without what is common
    passes: float  # how many there were, older ones as less
    context: int  # tokens in the cache at the last one

    def weight(self, context: int) -> float:
        """Returns how many passes they count as with more tokens in the cache."""
        return self.passes * float(0.5 ** ((context - self.context) / HALF))


class PassCost:
    """The seconds of forward passes."""

    def __init__(self, seconds: Mapping[int, float], source: str) -> None:
        """Keeps the seconds by rows.

        `seconds`: rows -> seconds of a pass, of 1 row and of more.
        """
        self._rows = sorted(seconds)
        self._seconds = [seconds[m] for m in self._rows]
        self.source = source
        self.most_rows = self._rows[-1]
        self._common, self._context = 1.0, 0
        self._seen: dict[int, Seen] = {}
        self._before = [self._known(m) for m in range(self.most_rows + 1)]
        self._table: list[float] | None = self._before

    def seconds(self, rows: int) -> float:
        """Returns the seconds of a pass.

        What passes take longer than known is on a straight line between rows that were
        seen, and the same beyond them. If they take a part of it, the part is.
        """
        if self._table is None:  # not at each plain step, of which many follow
            self._table = [self._estimate(m) for m in range(self.most_rows + 1)]
        if rows <= self.most_rows:
            return self._table[rows]
        return self._known(rows) * self._table[-1] / self._before[-1]

    def weight(self, rows: int) -> float:
        """Returns how many passes of these rows were seen, older ones as less."""
        seen = self._seen.get(rows)
        return seen.weight(self._context) if seen else 0.0

    def observe(self, rows: int, seconds: float, context: int) -> None:
        """Takes note of a pass.

        `context`: tokens in the cache.
        """
        self._context = context
        if rows > self.most_rows or seconds <= 0:
            return
        expected, seen = self._estimate(rows), self._seen.get(rows)
        if self._seen:
            seconds = min(max(seconds, expected / LARGEST), expected * LARGEST)
        if seen:
            self._common *= (seconds / expected) ** COMMON
        passes = min(self.weight(rows), MEMORY - 1) + 1
        found = seconds / self._common
        before = seen.seconds if seen else found
        average = before + (found - before) / passes
        self._seen[rows] = Seen(average, passes, context)
        self._table = None

    def _estimate(self, rows: int) -> float:
        return self._common * self._own(rows) if self._seen else self._before[rows]

    def _own(self, rows: int) -> float:
        """Returns the seconds of a pass without what is common."""
        if rows in self._seen:
            return self._seen[rows].seconds
        seen, known = sorted(self._seen), self._before[rows]
        at = bisect_left(seen, rows)
        low, high = seen[max(at - 1, 0)], seen[min(at, len(seen) - 1)]
        part = (rows - low) / (high - low) if high > low else 0.0

        def between(first: float, second: float) -> float:
            return first + part * (second - first)

        slower = between(
            *[self._seen[m].seconds - self._before[m] for m in (low, high)]
        )
        ratio = between(*[self._seen[m].seconds / self._before[m] for m in (low, high)])
        return known + slower if slower > 0 else known * ratio

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
