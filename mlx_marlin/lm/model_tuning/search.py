"""A greedy search for the fastest settings of a model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mlx_marlin.lm.model_tuning.comparison import Comparison, chosen
from mlx_marlin.lm.tuned_models.settings import DEFAULTS, ModelSettings
from mlx_marlin.weights.formats import LAYOUTS

FUSION_GAIN = 0.005
"""How much faster a fusion must be than the same settings without it to be combined
with others. The combination itself must meet the margin of `comparison`."""
FLAGS = (False, True)

Compare = Callable[[ModelSettings], Comparison]
"""Measures settings against stock MLX."""


def basic_settings(layouts: Sequence[str] = LAYOUTS) -> list[ModelSettings]:
    """Returns all combinations of layout, join and trace; the defaults come first."""
    found = [
        ModelSettings(layout=layout, join=join, trace=trace)
        for layout in layouts
        for join in FLAGS
        for trace in FLAGS
    ]
    return sorted(found, key=lambda each: each != DEFAULTS)


def steps(layouts: Sequence[str], fusions: Sequence[str]) -> int:
    """Returns how many comparisons a search usually makes, for a progress bar."""
    return len(basic_settings(layouts)) + len(fusions) + (len(fusions) > 1) + 1


@dataclass(kw_only=True)
class Search:
    """A search; `run` makes the comparisons, and `result` is what to keep.

    First all combinations of layout, join and trace are compared with stock MLX. On the
    best of them, joined and traced, because some fusions need joined layers, each
    fusion is compared alone, then those together that were faster, there and on the
    best traced settings. The choice is measured once more: the fastest of many
    measurements is partly luck. If it is not confirmed, the next best takes its place.
    """

    fusions: Sequence[str]  # The fusions to try
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

    def run(self, compare: Compare) -> Iterator[Comparison]:
        """Yields each comparison after it was made; then `result` is known.

        `compare`, which has a model in memory, is not kept.
        """
        yield from self._measure(compare, basic_settings(self.layouts))
        yield from self._fusions(compare)
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

    def _fusions(self, compare: Compare) -> Iterator[Comparison]:
        base = self._fastest(joined=True) or self._fastest()
        if base is None:
            return
        alone = [replace(base, fuse=(name,)) for name in self.fusions]
        yield from self._measure(compare, alone)
        gains = tuple(each.fuse[0] for each in alone if self._gains(each, base))
        if gains:
            bases = dict.fromkeys((base, self._fastest() or base))
            yield from self._measure(
                compare, [replace(each, fuse=gains) for each in bases]
            )

    def _fastest(self, joined: bool = False) -> ModelSettings | None:
        """Returns the fastest traced settings without fusions, or None."""
        found = [
            settings
            for settings, each in self.measured.items()
            if settings.trace and not settings.fuse and not each.excluded
            if settings.join or not joined
        ]
        return max(found, key=lambda each: self.measured[each].speedup, default=None)

    def _gains(self, settings: ModelSettings, base: ModelSettings) -> bool:
        if settings not in self.measured:
            return False
        least = self.measured[base].speedup * (1 + FUSION_GAIN)
        return self.measured[settings].speedup >= least

    def _confirm(self, compare: Compare) -> Iterator[Comparison]:
        """Measures the choice once more until a choice is confirmed."""
        open_ = dict(self.measured)
        while (first := chosen([*open_.values()])) is not None:
            settings = first.settings
            assert settings is not None
            if not first.is_faster:
                break  # the defaults, which are as fast as stock MLX
            again = compare(settings)
            yield again
            self.measured[settings] = open_[settings] = again
            if again.is_faster:
                self.result = again
                return
        self.result = first
