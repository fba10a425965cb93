"""The speed of settings relative to stock MLX, and which settings are kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean

from mlx_marlin.lm.tuned_models.settings import (
    DEFAULTS,
    ModelSettings,
    name_of,
)

MARGIN = 0.02
"""How much faster than stock MLX settings must be, as the geometric mean over the
numbers of streams, and how much slower they may be at one of them."""
PROMPT_MARGIN = 0.05
"""How much slower the prompt may be read: it is one pass, which varies more."""
TIE = 0.01
"""Simpler settings are kept if they are within this of the fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Settings compared with stock MLX."""

    # The settings; None for stock MLX, with another environment
    settings: ModelSettings | None
    # Number of streams -> stock MLX's time of a step over that with the settings
    speedups: Mapping[int, float] = field(default_factory=dict)
    # Likewise for reading the prompts
    prompts: Mapping[int, float] = field(default_factory=dict)
    excluded: str | None = None  # Why the settings must not be used, or None

    @property
    def speedup(self) -> float:
        """The geometric mean over the numbers of streams; 0 if excluded."""
        return 0.0 if self.excluded else geometric_mean(self.speedups.values())

    @property
    def is_harmless(self) -> bool:
        """Whether nothing is slower than stock MLX beyond the margins."""
        return self.excluded is None and (
            min(self.speedups.values()) >= 1 - MARGIN
            and min(self.prompts.values(), default=1.0) >= 1 - PROMPT_MARGIN
        )

    @property
    def is_faster(self) -> bool:
        """Whether it is harmless, and faster than stock MLX by the margin."""
        return self.is_harmless and self.speedup >= 1 + MARGIN

    @property
    def verdict(self) -> str:
        """What the comparison says about the settings, in a line."""
        if self.excluded:
            return f"not used: {self.excluded}"
        if not self.is_harmless:
            return "slower than stock MLX"
        return "faster" if self.is_faster else "no difference"


def chosen(measured: Sequence[Comparison]) -> Comparison | None:
    """Returns the comparison whose settings to keep; None for stock MLX.

    Of the settings that are faster than stock MLX, the simplest that is within `TIE` of
    the fastest. If none is, the defaults, unless they are slower than stock MLX.
    """
    faster = [each for each in measured if each.is_faster]
    if faster:
        least = max(each.speedup for each in faster) / (1 + TIE)
        near = [each for each in faster if each.speedup >= least]
        return min(near, key=lambda each: (_complexity(each), -each.speedup))
    harmless = (each for each in measured if each.is_harmless)
    return next((each for each in harmless if each.settings == DEFAULTS), None)


def line(comparison: Comparison) -> list[str]:
    """Returns the cells of a comparison's line in a table."""
    speeds = [f"{each:.3f}" for each in comparison.speedups.values()]
    return [name_of(comparison.settings), *speeds, comparison.verdict]


def _complexity(comparison: Comparison) -> int:
    return 0 if comparison.settings is None else comparison.settings.complexity
