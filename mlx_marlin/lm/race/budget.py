"""The time of a race: what is not expected to fit in it is not begun."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

FEW = 16
"""Rows up to which work takes as long as with fewer; then it grows with the rows."""


@dataclass(kw_only=True)
class Budget:
    """Time for items of work, each of which has a number of rows."""

    now: Callable[[], float]  # The clock
    end: float  # When the time is over
    # Whether the next item is begun whatever it takes, so that each load finishes one
    needs_one: bool = True
    _latest: tuple[int, float] = field(default=(FEW, 0.0), init=False)

    @property
    def is_over(self) -> bool:
        """Whether there is no more time."""
        return self.now() >= self.end

    def fits(self, m: int) -> bool:
        """Returns whether an item of m rows fits, by what the latest one took."""
        return self.needs_one or (not self.is_over and self._fits_after_latest(m))

    def _fits_after_latest(self, m: int) -> bool:
        rows, seconds = self._latest
        growth = max(1.0, m / max(rows, FEW))
        return self.now() + seconds * growth <= self.end

    @contextmanager
    def spending(self, m: int) -> Iterator[None]:
        """Notes what an item of m rows takes."""
        self.needs_one, began = False, self.now()
        yield
        self._latest = m, self.now() - began
