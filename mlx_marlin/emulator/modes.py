"""How kernels run: what holds for every launch in a block of code."""

from __future__ import annotations

import os
from contextvars import ContextVar
from dataclasses import dataclass

from mlx_marlin.emulator.counters import Counters

MOST_RESIDENT = 256


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the emulator runs.

    Attributes:
        seed: Of the shuffled order.
        workers: Host threads.
        trace: Whether every access to memory is checked.
        resident: Threadgroups of a host thread that take turns.
        time_limit: Seconds that a threadgroup may take.
    """

    seed: int = 0
    workers: int = os.cpu_count() or 1
    trace: bool = False
    resident: int = 1
    time_limit: float = 60.0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers={self.workers} is not positive")
        if not 1 <= self.resident <= MOST_RESIDENT:
            raise ValueError(
                f"resident={self.resident} is not between 1 and {MOST_RESIDENT}"
            )
        if not self.time_limit > 0:
            raise ValueError(f"time_limit={self.time_limit} is not positive")


DEFAULT = Options()
options = ContextVar("options", default=DEFAULT)
"""How kernels run in this context."""
launches: ContextVar[list[Counters] | None] = ContextVar("launches", default=None)
"""Where the counters of traced launches go, if somebody collects them."""
