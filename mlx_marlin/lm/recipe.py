"""What `optimize` does with a model: its options, resolved, and where each is from."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.nn as nn

from mlx_marlin.backends import measured_results, selection
from mlx_marlin.lm import measured_models
from mlx_marlin.lm.known_layers import is_packed_faster, is_tracing_faster
from mlx_marlin.lm.layer_conversion import LayerConversion
from mlx_marlin.lm.measured_models import MeasuredModel
from mlx_marlin.lm.options import FUSIONS, fusions
from mlx_marlin.lm.race.settings import DEFAULTS, STOCK
from mlx_marlin.planning.measurement import Forwards
from mlx_marlin.products import this_machine
from mlx_marlin.tables import aligned

HEADS = ("option", "value", "from")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The options of `optimize` that decide what becomes of a model.

    `str` returns a table of them.
    """

    # The options for single layers. `layout` is None if each has the default of its
    # kind
    conversion: LayerConversion
    join: bool  # Whether layers with the same input are joined
    trace: bool  # Whether decoder blocks are traced
    fuse: frozenset[str]  # The fusions of traced blocks
    compute: str | None  # The dtype to compute in; None for the model's own
    given: frozenset[str]  # Names of the options that the caller has given
    # What `layout`, `join`, `trace` and `fuse` are from; None if they were not measured
    measured: MeasuredModel | None
    backend: str  # The back end whose defaults the others are
    measure: bool  # Whether a model that was never timed here is timed
    # What the times of the whole model are kept by; "" if it cannot be read
    key: str = ""
    # The times that are kept; `layout` is from them if it is not given
    raced: Forwards | None = None

    @property
    def decides_layout(self) -> bool:
        """Whether the race decides the layout, because nothing else does."""
        return "layout" not in self.given and self.measured is None

    @property
    def layout(self) -> str:
        """The layout of linear layers."""
        return self.conversion.layout or ("marlin" if is_packed_faster() else "mlx")

    def with_layout(self, layout: str) -> "Recipe":
        """Returns this recipe with another layout, and the default of `join` for it."""
        join = self.join if "join" in self.given or self.measured else None
        if join is None:
            join = is_tracing_faster() and layout != "mlx"
        conversion = replace(self.conversion, layout=layout)
        return replace(self, conversion=conversion, join=join)

    @property
    def is_stock(self) -> bool:
        """Whether the model is left to stock MLX, because that was faster."""
        return self.measured is not None and self.measured.settings is None

    @property
    def options(self) -> dict[str, Any]:
        """The values by the names of the arguments of `optimize`.

        `layout` is "stock MLX" if `is_stock`. A layout by default is that of linear
        layers.
        """
        single = {
            each.name: getattr(self.conversion, each.name)
            for each in fields(self.conversion)
        }
        return {
            **single,
            "layout": STOCK if self.is_stock else self.layout,
            "join": self.join,
            "trace": self.trace,
            "fuse": tuple(name for name in FUSIONS if name in self.fuse),
            "compute": self.compute,
            "measure": self.measure,
        }

    def source(self, option: str) -> str:
        """Returns where an option is from: given, measured, or a default."""
        if option in self.given:
            return "given"
        is_raced = self.raced is not None and option == "layout"
        is_measured = self.measured is not None and option in DEFAULTS.options
        if is_raced or is_measured:
            return "measured"
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
    join: bool | None = None,
    trace: bool | None = None,
    fuse: Iterable[str] | None = None,
    compute: str | None = None,
    measure: bool = True,
) -> Recipe:
    """Returns what `optimize` does with a model.

    Measured settings are used if nothing is given that they depend on, or the layers
    measured with them.

    `trace`: none for the default.
    `fuse`: none for the default.
    `compute`: none for the model's own dtype.
    """
    named = {"join": join, "trace": trace, "fuse": fuse, "compute": compute}
    given = {name for name, value in named.items() if value is not None}
    given |= _differing(conversion)
    not_measured = frozenset() if measure else frozenset({"measure"})
    measured = None if given - {"group_size", "bits"} else measured_models.find(model)
    if measured is not None:
        settings = measured.settings or DEFAULTS
        if measured.settings is not None:
            conversion = replace(conversion, layout=settings.layout)
        join, trace, fuse = settings.join, settings.trace, settings.fuse
    faster = is_tracing_faster()
    trace = faster if trace is None else trace
    fused = fusions(fuse, trace)
    recipe = Recipe(
        conversion=conversion,
        join=faster and conversion.layout != "mlx" if join is None else join,
        trace=trace,
        fuse=fused if trace else frozenset(),
        compute=compute,
        given=not_measured | given,
        measured=measured,
        backend=selection.backend(),
        measure=measure,
    )
    return _with_measurements(model, recipe)


def _with_measurements(model: nn.Module, recipe: Recipe) -> Recipe:
    """Returns a recipe with what the race has found for the model, if it has run."""
    if not recipe.measure or recipe.backend not in selection.ON_GPU:
        return recipe
    key = measured_models.key_of(model)
    if key is None:
        return recipe
    options = {**recipe.options, "layout": recipe.conversion.layout, "measure": None}
    digest = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:8]
    recipe = replace(recipe, key=f"{key}-{digest}")
    device = this_machine.device()
    raced = measured_results.forwards(device, recipe.backend).get(recipe.key)
    recipe = replace(recipe, raced=raced)
    if raced is None or not recipe.decides_layout or raced.layout == recipe.layout:
        return recipe
    return recipe.with_layout(raced.layout)


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
