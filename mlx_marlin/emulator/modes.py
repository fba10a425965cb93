"""How kernels run: what holds for every launch in a block of code."""

from __future__ import annotations

import os
from contextvars import ContextVar
from dataclasses import dataclass

from mlx_marlin.emulator.counters import Counters


@dataclass(frozen=True)
class Options:
    """How the emulator runs: shuffle seed, number of host threads, trace mode."""

    seed: int
    workers: int
    trace: bool


DEFAULT = Options(seed=0, workers=os.cpu_count() or 1, trace=False)
options = ContextVar("options", default=DEFAULT)
"""How kernels run in this context."""
launches: ContextVar[list[Counters] | None] = ContextVar("launches", default=None)
"""Where the counters of traced launches go, if somebody collects them."""
