"""The settings of `optimize` that `tune` compares, and which of them it keeps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Any

from mlx_marlin.lm.options import FUSIONS
from mlx_marlin.planning.measurement import PROMPTS
from mlx_marlin.regular_files import quoted
from mlx_marlin.weights.formats import LAYOUTS

MARGIN = 0.02
"""How much faster than stock MLX settings must be, as the geometric mean over the
numbers of rows, and how much slower they may be at one of them."""
PROMPT_MARGIN = 0.05
"""How much slower a prompt may be: it is one pass, which varies more."""
TIE = 0.01
"""Simpler settings are kept if they are within this of the fastest."""
FUSION_GAIN = 0.005
"""How much faster a fusion must be than the same settings without it to be combined
with others. The combination itself must meet `MARGIN`."""
FLAGS = (False, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The options of `optimize` that change how fast a model decodes."""

    layout: str = "mlx"  # As for `optimize`, and so are the others
    join: bool = False  # Whether layers with the same input are joined
    trace: bool = False  # Whether decoder blocks are traced
    # The fusions of traced blocks, in the order of `FUSIONS`
    fuse: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={quoted(self.layout, 60)}, expected {LAYOUTS}")
        if self.fuse != tuple(name for name in FUSIONS if name in self.fuse):
            raise ValueError(f"fuse={quoted(self.fuse, 60)}, expected {(*FUSIONS,)}")
        if self.fuse and not self.trace:
            raise ValueError(f"fuse={self.fuse!r}: expected trace=True")

    @property
    def complexity(self) -> int:
        """How many options differ from the defaults."""
        switched = (self.layout != DEFAULTS.layout, self.join, self.trace)
        return sum(switched) + len(self.fuse)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `optimize`."""
        flags = {"join": self.join, "trace": self.trace}
        return {"layout": self.layout, **flags, "fuse": self.fuse}

    def __str__(self) -> str:
        """Returns the options that differ from the defaults."""
        layout = f"layout={self.layout}" if self.layout != DEFAULTS.layout else ""
        flags = ["join"] * self.join + ["trace"] * self.trace
        fuse = f"fuse={'+'.join(self.fuse)}" if self.fuse else ""
        return ", ".join(filter(None, (layout, *flags, fuse))) or "defaults"


DEFAULTS = ModelSettings()
"""What `optimize` does without arguments where `tune` has measured nothing."""
STOCK = "stock MLX"
"""Name of a model that is not converted."""


def name_of(settings: ModelSettings | None) -> str:
    """Returns the name of settings; None is stock MLX."""
    return STOCK if settings is None else str(settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Forward passes with settings, compared with stock MLX's."""

    # The settings; None for stock MLX, with another environment
    settings: ModelSettings | None
    # Rows -> seconds of a pass with stock MLX and with the settings
    seconds: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    excluded: str | None = None  # Why the settings must not be used, or None

    @property
    def speedups(self) -> dict[int, float]:
        """Rows -> stock MLX's time over that with the settings, without prompts."""
        every = {m: stock / own for m, (stock, own) in self.seconds.items()}
        return {m: ratio for m, ratio in every.items() if m < PROMPTS[0]}

    @property
    def speedup(self) -> float:
        """The geometric mean over the numbers of rows; 0 if excluded."""
        return 0.0 if self.excluded else geometric_mean(self.speedups.values())

    @property
    def is_harmless(self) -> bool:
        """Whether nothing is slower than stock MLX beyond the margins."""
        return self.excluded is None and all(
            stock / own >= 1 - (MARGIN if m < PROMPTS[0] else PROMPT_MARGIN)
            for m, (stock, own) in self.seconds.items()
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


Compare = Callable[[ModelSettings], Comparison]
"""Measures settings against stock MLX."""


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


def _complexity(comparison: Comparison) -> int:
    return 0 if comparison.settings is None else comparison.settings.complexity


def basic_settings(layouts: Sequence[str] = LAYOUTS) -> list[ModelSettings]:
    """Returns all combinations of layout, join and trace; the defaults come first."""
    found = [
        ModelSettings(layout=layout, join=join, trace=trace)
        for layout in layouts
        for join in FLAGS
        for trace in FLAGS
    ]
    return sorted(found, key=lambda each: each != DEFAULTS)


@dataclass(kw_only=True)
class Search:
    """A search; `run` makes the comparisons, and `result` is what to keep.

    First all combinations of layout, join and trace are compared with stock MLX. On the
    best of them, joined and traced, because some fusions need joined layers, each
    fusion is compared alone, then those together that were faster, there and on the
    best traced settings. The choice is measured once more: the fastest of many
    measurements is partly luck. If it is not confirmed, the next best takes its place.
    """

    fusions: Sequence[str] = (*FUSIONS,)  # The fusions to try
    layouts: Sequence[str] = LAYOUTS  # The layouts to try
    # Whether no further settings are to be tried. The choice among those that were is
    # confirmed nevertheless
    is_over: Callable[[], bool] = lambda: False
    # The latest comparison of each settings
    measured: dict[ModelSettings, Comparison] = field(default_factory=dict)
    # The comparison of the settings to keep; None if stock MLX is to be kept
    result: Comparison | None = None
    # Settings for which there was no time
    skipped: list[ModelSettings] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many comparisons a search usually makes, for a progress bar."""
        count = len(self.fusions)
        return len(basic_settings(self.layouts)) + count + (count > 1) + 1

    def run(self, compare: Compare) -> Iterator[Comparison]:
        """Yields each comparison after it was made; then `result` is known.

        `compare`, which has a model in memory, is not kept.
        """
        yield from self._measure(compare, basic_settings(self.layouts))
        base = self._fastest(joined=True) or self._fastest()
        if base is not None:
            yield from self._fuse(compare, base)
        yield from self._confirm(compare)

    def _measure(
        self, compare: Compare, wanted: Sequence[ModelSettings]
    ) -> Iterator[Comparison]:
        for settings in wanted:
            if self.is_over() and self.measured:
                self.skipped.append(settings)
            elif settings not in self.measured:
                self.measured[settings] = compare(settings)
                yield self.measured[settings]

    def _fuse(self, compare: Compare, base: ModelSettings) -> Iterator[Comparison]:
        alone = [replace(base, fuse=(name,)) for name in self.fusions]
        yield from self._measure(compare, alone)
        least = self.measured[base].speedup * (1 + FUSION_GAIN)
        known = [self.measured[each] for each in alone if each in self.measured]
        faster = [each.settings for each in known if each.speedup >= least]
        gains = tuple(each.fuse[0] for each in faster if each)
        if gains:
            bases = dict.fromkeys((base, self._fastest() or base))
            together = [replace(each, fuse=gains) for each in bases]
            yield from self._measure(compare, together)

    def _fastest(self, joined: bool = False) -> ModelSettings | None:
        """Returns the fastest traced settings without fusions, or None."""
        found = [
            settings
            for settings, each in self.measured.items()
            if settings.trace and not settings.fuse and not each.excluded
            if settings.join or not joined
        ]
        return max(found, key=lambda each: self.measured[each].speedup, default=None)

    def _confirm(self, compare: Compare) -> Iterator[Comparison]:
        """Measures the choice once more until a choice is confirmed."""
        open_ = dict(self.measured)
        while (first := chosen([*open_.values()])) is not None:
            settings = first.settings
            if settings is None or not first.is_faster:
                break  # the defaults, which are as fast as stock MLX
            again = compare(settings)
            yield again
            self.measured[settings] = open_[settings] = again
            if again.is_faster:
                self.result = again
                return
        self.result = first
