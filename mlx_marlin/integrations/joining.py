"""Finds a model's layers that share x, and joins them."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.integrations.module_changes import Changes, Position
from mlx_marlin.joined import MarlinPart, can_join, join, separate
from mlx_marlin.nn import MarlinLinear

SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that take the same x in the models of mlx-lm."""


def join_layers(model: nn.Module, changes: Changes) -> None:
    """Joins the layers of a model that share x, wherever their kinds allow it.

    Args:
        model: A model whose linear layers are converted already.
        changes: Takes what is changed.
    """
    shared = Counter(id(child) for each in _modules(model) for child in each.values())
    for module in _modules(model):
        for names in SHARING:
            layers: list[Any] = [module.get(name) for name in names]
            # A layer that hangs in two places has other company in each.
            alone = all(shared[id(layer)] == 1 for layer in layers)
            if alone and can_join(layers):
                parts = join(layers)
                mx.eval(parts[0].shared.layer)
                changes.replace(_positions(module, names), parts, _separated)


def separate_layers(model: nn.Module, changes: Changes) -> None:
    """Makes layers of their own of all that `join_layers` joined.

    Args:
        model: The model.
        changes: Takes what is changed.
    """
    for module in _modules(model):
        for names in SHARING:
            parts: list[Any] = [module.get(name) for name in names]
            if all(isinstance(part, MarlinPart) for part in parts):
                layers = separate(parts[0].shared)
                mx.eval(layers)
                changes.replace(_positions(module, names), layers, join)


def _separated(parts: list[MarlinPart]) -> list[MarlinLinear]:
    return separate(parts[0].shared)


def _positions(module: nn.Module, names: tuple[str, ...]) -> list[list[Position]]:
    return [[(module, name)] for name in names]


def _modules(tree: Any) -> Iterator[nn.Module]:
    # As `nn.Module.children` looks for them; shared ones come once.
    found: dict[int, nn.Module] = {}
    waiting = [tree]
    while waiting:
        each = waiting.pop()
        if isinstance(each, nn.Module):
            if id(each) in found:
                continue
            found[id(each)] = each
        if isinstance(each, dict | list):
            waiting.extend(each.values() if isinstance(each, dict) else each)
    return iter(found.values())
