"""Joins the layers of a model that have the same input, and separates them."""

from collections import Counter
from typing import Any

import mlx.nn as nn

from mlx_marlin.layers.joined import MarlinPart, can_join, join, separate
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm.module_changes import Changes, Position, Rebuild, module_at
from mlx_marlin.lm.module_tree import containers, entries, modules

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that have the same input in mlx-lm's models."""


def join_layers(model: nn.Module, changes: Changes) -> None:
    """Joins the layers with the same input whose formats are the same."""
    uses = Counter(id(child) for module in modules(model) for child in module.values())
    for module in modules(model):
        for names in SAME_INPUT:
            layers: list[Any] = [module.get(name) for name in names]
            # A layer that two modules share could be joined differently in each.
            unshared = all(uses[id(layer)] == 1 for layer in layers)
            if unshared and can_join(layers):
                positions = [[(module, name)] for name in names]
                changes.replace(positions, join(layers), _separated)


def separate_layers(model: nn.Module, changes: Changes) -> None:
    """Replaces all parts of joined layers, also those in adapters, by layers."""
    groups: dict[int, dict[int, list[Position]]] = {}
    for container in containers(model):
        for key, child in entries(container):
            if isinstance(child, MarlinPart):
                group = groups.setdefault(id(child.shared), {})
                group.setdefault(child.index, []).append((container, key))
    for positions in groups.values():
        _separate(positions, changes)


def _separate(positions: dict[int, list[Position]], changes: Changes) -> None:
    """Replaces the parts of one joined layer by layers."""
    indices = sorted(positions)
    parts = [module_at(positions[index]) for index in indices]
    layers = separate(parts[0].shared)
    own = [layers[index] for index in indices]
    # If a part is missing from the model, the others cannot be joined again.
    rebuild: Rebuild = join if len(own) == len(layers) else lambda _: parts
    changes.replace([positions[index] for index in indices], own, rebuild)


def _separated(parts: list[MarlinPart]) -> list[MarlinLinear]:
    return separate(parts[0].shared)
