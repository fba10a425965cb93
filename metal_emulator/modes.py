"""Options of the emulator, per context."""

from __future__ import annotations

import os
from contextvars import ContextVar
from dataclasses import dataclass

from metal_emulator.counters import Counters

MAX_RESIDENT = 256
TENSOR_LAYOUTS = ("m5", "g16", "scrambled")
"""Orders of the elements of cooperative tensors, as in include/tensor/layout.h."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a launch."""

    seed: int = 0  # Seed of the order in which threadgroups and simdgroups run
    workers: int = os.cpu_count() or 1  # Host threads
    trace: bool = False  # Whether to check every memory access
    resident: int = 1  # Threadgroups that one host thread interleaves
    time_limit: float = 60.0  # Maximum seconds per threadgroup
    tensor_layout: str = "m5"  # Order of the elements of cooperative tensors
    # Whether an output element that no thread writes is an error
    complete: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers={self.workers} is not positive")
        if not 1 <= self.resident <= MAX_RESIDENT:
            raise ValueError(
                f"resident={self.resident} is not between 1 and {MAX_RESIDENT}"
            )
        if not self.time_limit > 0:
            raise ValueError(f"time_limit={self.time_limit} is not positive")
        if self.tensor_layout not in TENSOR_LAYOUTS:
            raise ValueError(
                f"tensor_layout={self.tensor_layout!r} is not one of {TENSOR_LAYOUTS}"
            )


DEFAULT = Options()
options = ContextVar("options", default=DEFAULT)
"""Options of the current context."""
launches: ContextVar[list[Counters] | None] = ContextVar("launches", default=None)
"""List to which the counters of traced launches are appended, or None."""
