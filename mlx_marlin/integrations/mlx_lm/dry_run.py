"""What `optimize(model, dry_run=True)` returns: what becomes of each layer."""

from dataclasses import dataclass

import mlx.nn as nn

from mlx_marlin.integrations.float16 import Float16Outcome
from mlx_marlin.integrations.mlx_lm.known_layers import is_plain
from mlx_marlin.integrations.mlx_lm.layer_conversion import (
    LayerConversion,
    has_stock_format,
    is_marlin_layer,
)
from mlx_marlin.integrations.mlx_lm.module_tree import (
    common_path,
    named_layers,
    pattern,
)
from mlx_marlin.integrations.tuned_models.results import TunedModel
from mlx_marlin.integrations.tuned_models.settings import name_of
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.planning.choice import aligned

HEADS = ("layer", "count", "is", "optimize", "layout", "why not")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOutcome:
    """What `optimize` does with a layer.

    Attributes:
        name: The path of the layer.
        layer: The name of its class.
        is_converted: Whether `optimize` converts it, or has done so.
        layout: The layout that the weight has then; None if it is not converted.
        reason: Why it stays as it is, or becomes MLX's layer again; None if it is
            converted.
        is_restored: Whether `optimize` converts it back to MLX's layer.
    """

    name: str
    layer: str
    is_converted: bool
    layout: str | None = None
    reason: str | None = None
    is_restored: bool = False

    @property
    def action(self) -> str:
        """What `optimize` does, in a word."""
        if self.is_restored:
            return "restores"
        return "converts" if self.is_converted else "keeps"


@dataclass(frozen=True, slots=True)
class DryRun:
    """What `optimize` does with a model. `str` returns a table.

    Attributes:
        layers: Each layer that has a weight to multiply by, in the model's order.
        float16: What `compute="float16"` converts; None without it.
        tuned: The settings that `mlx-marlin tune` found for the model and that are
            used, with the measured speed; None if there are none.
    """

    layers: tuple[LayerOutcome, ...]
    float16: Float16Outcome | None = None
    tuned: str | None = None

    @property
    def converted(self) -> tuple[str, ...]:
        """The paths of the layers that `optimize` converts, or has converted."""
        return tuple(each.name for each in self.layers if each.is_converted)

    @property
    def kept(self) -> dict[str, str]:
        """The reason of each layer that stays or becomes MLX's, by the layer's path."""
        return {each.name: each.reason for each in self.layers if each.reason}

    def __str__(self) -> str:
        """Returns a table in which equal layers at corresponding paths are one line.

        Tuned settings that are used are the last line.
        """
        groups: dict[tuple[object, ...], list[str]] = {}
        for each in self.layers:
            outcome = (each.layer, each.action, each.layout, each.reason)
            groups.setdefault((pattern(each.name), *outcome), []).append(each.name)
        rows = [[*HEADS]]
        for (_, *outcome_of_all), names in groups.items():
            cells = (common_path(names), len(names), *outcome_of_all)
            rows.append(["-" if cell is None else str(cell) for cell in cells])
        table = aligned(rows)
        tuned = f"tuned settings, {self.tuned}" if self.tuned else None
        return "\n".join(str(each) for each in (table, self.float16, tuned) if each)


def dry_run(
    model: nn.Module,
    conversion: LayerConversion,
    float16: Float16Outcome | None = None,
    tuned: TunedModel | None = None,
) -> DryRun:
    """Returns what a conversion does with each layer of a model. Changes nothing.

    Args:
        model: The model.
        conversion: The conversion.
        float16: What `compute="float16"` converts.
        tuned: The tuned result that is used, if there is one.
    """
    stock = None if tuned is None or tuned.settings is not None else tuned.reason
    layers = ((name, _whole(layer)) for name, layer in named_layers(model))
    return DryRun(
        tuple(
            _outcome(name, layer, conversion, stock)
            for name, layer in layers
            if is_plain(layer) or "scales" in layer or "quantizers" in layer
        ),
        float16,
        f"{name_of(tuned.settings)}: {tuned.reason}" if tuned else None,
    )


def _whole(layer: nn.Module) -> nn.Module:
    return layer.shared.layer if isinstance(layer, MarlinPart) else layer


def _outcome(
    name: str, layer: nn.Module, conversion: LayerConversion, stock: str | None
) -> LayerOutcome:
    reason = None
    if conversion.applies_to(layer):
        layout: str | None = conversion.layout_of(layer)
    elif is_marlin_layer(layer):
        layout = getattr(layer, "layout", "mlx")
    else:
        layout, reason = None, conversion.why_not(layer)
    if stock is not None and not getattr(layer, "is_packed_only", False):
        layout, reason = None, reason or stock
    return LayerOutcome(
        name=name,
        layer=type(layer).__name__,
        is_converted=layout is not None,
        layout=layout,
        reason=reason,
        is_restored=stock is not None and has_stock_format(layer),
    )
