"""What `optimize` does with a model: its options, resolved, and where each is from."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.nn as nn

from mlx_marlin.backends import selection
from mlx_marlin.lm.fusions import FUSIONS, fusions
from mlx_marlin.lm.known_layers import is_packed_faster, is_tracing_faster
from mlx_marlin.lm.layer_conversion import LayerConversion
from mlx_marlin.lm.tuned_models import lookup
from mlx_marlin.lm.tuned_models.results import TunedModel
from mlx_marlin.lm.tuned_models.settings import DEFAULTS, STOCK
from mlx_marlin.planning.choice import aligned

HEADS = ("option", "value", "from")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The options of `optimize` that decide what becomes of a model.

    `str` returns a table of them.

    Attributes:
        conversion: The options for single layers. `layout` is None if each layer has
            the default of its kind.
        join: Whether layers with the same input are joined.
        trace: Whether decoder blocks are traced.
        fuse: The fusions of traced blocks.
        compute: The dtype to compute in; None for the model's own.
        given: Names of the options that the caller has given.
        tuned: The result of tuning that `layout`, `join`, `trace` and `fuse` are from;
            None if they are not.
        backend: The back end whose defaults the others are.
    """

    conversion: LayerConversion
    join: bool
    trace: bool
    fuse: frozenset[str]
    compute: str | None
    given: frozenset[str]
    tuned: TunedModel | None
    backend: str

    @property
    def is_stock(self) -> bool:
        """Whether the model is left to stock MLX, because that was faster."""
        return self.tuned is not None and self.tuned.settings is None

    @property
    def options(self) -> dict[str, Any]:
        """The values by the names of the arguments of `optimize`.

        `layout` is "stock MLX" if `is_stock`. A layout by default is that of linear
        layers.
        """
        layout = self.conversion.layout or ("marlin" if is_packed_faster() else "mlx")
        single = {
            each.name: getattr(self.conversion, each.name)
            for each in fields(self.conversion)
        }
        return {
            **single,
            "layout": STOCK if self.is_stock else layout,
            "join": self.join,
            "trace": self.trace,
            "fuse": tuple(name for name in FUSIONS if name in self.fuse),
            "compute": self.compute,
        }

    def source(self, option: str) -> str:
        """Returns where an option is from: "given", "tuned" or a back end's default."""
        if option in self.given:
            return "given"
        if self.tuned is not None and option in DEFAULTS.options:
            return "tuned"
        return f"default on {self.backend}"

    def __str__(self) -> str:
        """Returns a table of the options, their values, and where they are from."""
        rows = [
            [name, _shown(value), self.source(name)]
            for name, value in self.options.items()
        ]
        return aligned([[*HEADS], *rows])


def resolve(
    model: nn.Module,
    conversion: LayerConversion,
    *,
    join: bool | None,
    trace: bool | None,
    fuse: Iterable[str] | None,
    compute: str | None,
) -> Recipe:
    """Returns what `optimize` does with a model.

    Tuned settings are used if nothing is given that they, or the layers measured with
    them, depend on.

    Args:
        model: The model.
        conversion: The options for single layers.
        join: As for `optimize`, and so are the others.
        trace: None for the default.
        fuse: None for the default.
        compute: None for the model's own dtype.

    Raises:
        ValueError: If `fuse` is invalid, or fusions are named and nothing is traced.
    """
    named = {"join": join, "trace": trace, "fuse": fuse, "compute": compute}
    given = {name for name, value in named.items() if value is not None}
    given |= _differing(conversion)
    tuned = None if given - {"group_size", "bits"} else lookup.find(model)
    if tuned is not None:
        settings = tuned.settings or DEFAULTS
        if tuned.settings is not None:
            conversion = replace(conversion, layout=settings.layout)
        join, trace, fuse = settings.join, settings.trace, settings.fuse
    faster = is_tracing_faster()
    trace = faster if trace is None else trace
    fused = fusions(fuse, trace)
    return Recipe(
        conversion=conversion,
        join=faster and conversion.layout != "mlx" if join is None else join,
        trace=trace,
        fuse=fused if trace else frozenset(),
        compute=compute,
        given=frozenset(given),
        tuned=tuned,
        backend=selection.backend(),
    )


def _differing(conversion: LayerConversion) -> set[str]:
    """Returns the names of the options that differ from the defaults."""
    return {
        each.name
        for each in fields(conversion)
        if getattr(conversion, each.name) != each.default
    }


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(value) or "-"
    return "-" if value is None else str(value)
