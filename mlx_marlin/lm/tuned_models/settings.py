"""The options of `optimize` that tuning compares."""

from dataclasses import dataclass
from typing import Any

from mlx_marlin.lm.fusions import FUSIONS
from mlx_marlin.weights.formats import LAYOUTS

STREAMS = (1, 4, 8)
"""Numbers of prompts at a time with which settings are compared by default."""


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
            raise ValueError(f"layout={self.layout!r}, expected one of {LAYOUTS}")
        for name in ("join", "trace"):
            if type(value := getattr(self, name)) is not bool:
                raise ValueError(f"{name}={value!r}, expected True or False")
        if self.fuse != tuple(name for name in FUSIONS if name in self.fuse):
            raise ValueError(f"fuse={self.fuse!r}, expected some of {(*FUSIONS,)}")
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
        return {
            "layout": self.layout,
            "join": self.join,
            "trace": self.trace,
            "fuse": self.fuse,
        }

    def __str__(self) -> str:
        """Returns the options that differ from the defaults."""
        layout = f"layout={self.layout}" if self.layout != DEFAULTS.layout else ""
        flags = ["join"] * self.join + ["trace"] * self.trace
        fuse = f"fuse={'+'.join(self.fuse)}" if self.fuse else ""
        return ", ".join(filter(None, (layout, *flags, fuse))) or "defaults"


DEFAULTS = ModelSettings()
"""What `optimize` does without arguments where nothing was tuned."""
STOCK = "stock MLX"
"""Name of a model that is not converted."""


def name_of(settings: ModelSettings | None) -> str:
    """Returns the name of settings; None is stock MLX."""
    return STOCK if settings is None else str(settings)


def row(settings: ModelSettings | None) -> dict[str, Any] | None:
    """Returns settings as JSON-serializable values."""
    if settings is None:
        return None
    return {**settings.options, "fuse": [*settings.fuse]}


def settings_of(row: Any) -> ModelSettings | None:
    """Returns the settings that a row encodes."""
    if row is None:
        return None
    if {*row} != {*DEFAULTS.options}:
        raise ValueError(f"settings={row!r}, expected {(*DEFAULTS.options,)}")
    return ModelSettings(**{**row, "fuse": (*row["fuse"],)})
