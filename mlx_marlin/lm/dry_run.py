"""What `optimize(model, dry_run=True)` returns: what becomes of each layer."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn

from mlx_marlin.layers.joined import whole
from mlx_marlin.lm.float16 import Float16Outcome
from mlx_marlin.lm.known_layers import is_plain
from mlx_marlin.lm.layer_conversion import (
    LayerConversion,
    has_stock_format,
    is_marlin_layer,
)
from mlx_marlin.lm.module_tree import common_path, named_layers, pattern
from mlx_marlin.lm.race.settings import name_of
from mlx_marlin.lm.recipe import Recipe
from mlx_marlin.tables import aligned

HEADS = ("layer", "count", "is", "optimize", "layout", "why not")
BLOCK_HEADS = ("block", "count", "is", "optimize", "why not")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOutcome:
    """What `optimize` does with a layer."""

    name: str  # The path of the layer
    layer: str  # The name of its class
    is_converted: bool  # Whether `optimize` converts it, or has done so
    # The layout that the weight has then; None if it is not converted
    layout: str | None = None
    # Why it stays as it is, or becomes MLX's layer again; None if it is converted
    reason: str | None = None
    is_restored: bool = False  # Whether `optimize` converts it back to MLX's layer

    @property
    def action(self) -> str:
        """What `optimize` does, in a word."""
        if self.is_restored:
            return "restores"
        return "converts" if self.is_converted else "keeps"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOutcome:
    """What `trace=True` does with a decoder block."""

    name: str  # The path of the block
    block: str  # The name of its class
    reason: str | None = None  # Why it runs its own code; None if it is traced

    @property
    def action(self) -> str:
        """What `optimize` does, in a word."""
        return "traces" if self.reason is None else "keeps"


@dataclass(frozen=True, slots=True)
class DryRun:
    """What `optimize` does with a model. `str` returns a table.

    Attributes:
        recipe: The options, and where each is from.
        layers: Each layer that has a weight to multiply by, in the model's order.
        float16: What `compute="float16"` converts; None without it.
        blocks: Each decoder block, if blocks are to be traced.
    """

    recipe: Recipe
    layers: tuple[LayerOutcome, ...]
    float16: Float16Outcome | None = None
    blocks: tuple[BlockOutcome, ...] = ()

    @property
    def tuned(self) -> str | None:
        """The settings that `mlx-marlin tune` found for the model and that are used.

        With the measured speed; None if there are none.
        """
        found = self.recipe.measured
        return None if found is None else f"{name_of(found.settings)}: {found.reason}"

    @property
    def converted(self) -> tuple[str, ...]:
        """The paths of the layers that `optimize` converts, or has converted."""
        return tuple(each.name for each in self.layers if each.is_converted)

    @property
    def kept(self) -> dict[str, str]:
        """The reason of each layer that stays or becomes MLX's, by the layer's path."""
        return {each.name: each.reason for each in self.layers if each.reason}

    def __repr__(self) -> str:
        """Returns a line; `str` has the tables."""
        count = f"{len(self.converted)} of {len(self.layers)} layers"
        return f"<{type(self).__name__}: converts {count}>"

    def __str__(self) -> str:
        """Returns a table in which equal layers at corresponding paths are one line.

        The options are a table before it, and blocks to be traced one after it. Tuned
        settings that are used are the last line.
        """
        layers = [
            (each.name, each.layer, each.action, each.layout, each.reason)
            for each in self.layers
        ]
        blocks = [
            (each.name, each.block, each.action, each.reason) for each in self.blocks
        ]
        measured = f"measured settings, {self.tuned}" if self.tuned else None
        parts = (
            self.recipe,
            _table(HEADS, layers),
            blocks and _table(BLOCK_HEADS, blocks),
            self.float16,
            measured,
        )
        return "\n".join(str(each) for each in parts if each)


def _table(heads: Sequence[str], outcomes: Sequence[tuple[Any, ...]]) -> str:
    """Returns a table of outcomes, whose first cell is a path."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, *outcome in outcomes:
        groups.setdefault((pattern(name), *outcome), []).append(name)
    rows = [[*heads]]
    for (_, *outcome_of_all), names in groups.items():
        cells = (common_path(names), len(names), *outcome_of_all)
        rows.append(["-" if cell is None else str(cell) for cell in cells])
    return aligned(rows)


def dry_run(
    model: nn.Module,
    recipe: Recipe,
    float16: Float16Outcome | None = None,
    tracing: Any = None,
) -> DryRun:
    """Returns what a recipe does with each layer of a model. Changes nothing.

    `float16`: what `compute="float16"` converts.
    `tracing`: the module that traces blocks; None if there are none.
    """
    conversion, measured = recipe.conversion, recipe.measured
    # Whether a block can be traced depends on classes. Unpacked layers share arrays.
    unpacked = replace(conversion, layout="mlx")
    stock = measured.reason if measured and recipe.is_stock else None
    layers = ((name, whole(layer)) for name, layer in named_layers(model))
    return DryRun(
        recipe,
        tuple(
            _outcome(name, layer, conversion, stock)
            for name, layer in layers
            if is_plain(layer) or "scales" in layer or "packed_scales" in layer
        ),
        float16,
        tuple(
            BlockOutcome(name=name, block=cls, reason=reason)
            for name, cls, reason in tracing.block_outcomes(
                model, lambda block: _as_converted(block, unpacked)
            )
        )
        if tracing
        else (),
    )


def _as_converted(entry: Any, conversion: LayerConversion) -> Any:
    """Returns a module as `optimize` would leave it; the model's own stays as it is."""
    if not isinstance(entry, nn.Module):
        return entry
    if conversion.applies_to(entry):
        return conversion.convert(entry)
    twin = copy(entry)
    entries = {name: _as_converted(each, conversion) for name, each in entry.items()}
    dict.update(twin, entries)
    return twin


def _outcome(
    name: str, layer: nn.Module, conversion: LayerConversion, stock: str | None
) -> LayerOutcome:
    reason = None
    if conversion.applies_to(layer):
        layout: str | None = conversion.layout_of(layer)
    elif is_marlin_layer(layer):
        layout = layer.layout
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
