"""Compares the numbers of a weight with those of its source."""

import math

import numpy as np

from mlx_marlin.lm.verification.exact_weights import ExactWeight, Rows
from mlx_marlin.lm.verification.report import WeightReport
from mlx_marlin.lm.verification.thresholds import quantization_limit

ROW_FACTOR = 2.0
"""Limit of a row's quantization error, in that of the whole weight."""


class WeightComparison:
    """The differences of all rows of a weight, which are added one chunk at a time.

    If both have the same bits and group size, or only the source is quantized, numbers
    may differ by rounding them once, such as biases in MLX's layout. Otherwise weights
    were quantized, and rows are compared with the limit of the format.
    """

    def __init__(self, own: ExactWeight, source: ExactWeight) -> None:
        self._source = source.description
        self.rounding = max(own.rounding, source.rounding)
        self.limit = 0.0 if _has_codes_of(own, source) else _limit(own)
        self._changed = self._total = 0.0
        self._count = self._wrong = 0
        self._first: tuple[int, ...] | None = None

    @property
    def rms_limit(self) -> float:
        """Limit of the rms difference of quantized weights that were added."""
        return self.limit * math.sqrt(self._total / max(self._count, 1))

    def add(self, own: Rows, source: Rows) -> None:
        """Compares some rows with the same rows of the source."""
        change = np.abs(own.values - source.values)
        self._changed += float((change**2).sum())
        self._total += float((source.values**2).sum())
        self._count += change.size
        if self.limit:
            norms = np.sqrt((source.values**2).sum(1))
            changed = np.sqrt((change**2).sum(1))
            wrong = ~(changed <= ROW_FACTOR * self.limit * norms)
        else:
            terms = np.sqrt(np.maximum(own.terms, source.terms))
            wrong = ~(change <= self.rounding * terms)
        count = int(np.count_nonzero(wrong))
        if count and self._first is None:
            row, *column = (int(i) for i in np.argwhere(wrong)[0])
            self._first = (own.matrix, own.rows.start + row, *column)
        self._wrong += count

    def report(self) -> WeightReport:
        """Returns the differences of all rows that were added."""
        size = math.sqrt(self._total)
        changed = math.sqrt(self._changed)
        return WeightReport(
            source=self._source,
            relative=changed / size if size else math.inf if changed else 0.0,
            limit=self.limit,
            wrong=self._wrong,
            first_wrong=self._first,
        )


def _has_codes_of(own: ExactWeight, source: ExactWeight) -> bool:
    """Returns whether a weight was imported, not quantized."""
    if own.format is None or source.format is None:
        return own.format is None
    return own.format[1:] == source.format[1:]


def _limit(own: ExactWeight) -> float:
    assert own.format is not None
    mode, bits, _ = own.format
    return quantization_limit(mode, bits)
