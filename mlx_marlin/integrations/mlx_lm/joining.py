"""Finds a model's layers that share x, and joins them."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.integrations.mlx_lm.module_changes import (
    Changes,
    Position,
    Rebuild,
    module_at,
)
from mlx_marlin.layers.joined import MarlinPart, can_join, join, separate
from mlx_marlin.layers.linear import MarlinLinear

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

    They are found wherever they are, such as in adapters.

    Args:
        model: The model.
        changes: Takes what is changed.
    """
    groups: dict[int, dict[int, list[Position]]] = {}
    for container in _containers(model):
        pairs = (
            enumerate(container) if isinstance(container, list) else container.items()
        )
        for key, child in pairs:
            if isinstance(child, MarlinPart):
                group = groups.setdefault(id(child.shared), {})
                group.setdefault(child.index, []).append((container, key))
    for positions in groups.values():
        _separate(positions, changes)


def _separate(positions: dict[int, list[Position]], changes: Changes) -> None:
    """Replaces the parts of one product by layers.

    Args:
        positions: Of each part that is in the model, by its index.
        changes: Takes what is changed.
    """
    indices = sorted(positions)
    parts = [module_at(positions[index]) for index in indices]
    layers = separate(parts[0].shared)
    mx.eval(layers)
    own = [layers[index] for index in indices]
    # Those of an incomplete product could not be joined again.
    rebuild: Rebuild = join if len(own) == len(layers) else partial(_return, parts)
    changes.replace([positions[index] for index in indices], own, rebuild)


def _return(parts: list[nn.Module], _: list[Any]) -> list[nn.Module]:
    return parts


def _separated(parts: list[MarlinPart]) -> list[MarlinLinear]:
    return separate(parts[0].shared)


def _positions(module: nn.Module, names: tuple[str, ...]) -> list[list[Position]]:
    return [[(module, name)] for name in names]


def _modules(tree: Any) -> Iterator[nn.Module]:
    return (each for each in _containers(tree) if isinstance(each, nn.Module))


def _containers(tree: Any) -> Iterator[Any]:
    # As `nn.Module.children` looks for them; shared ones come once.
    found: dict[int, Any] = {}
    waiting = [tree]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict | list) and id(each) not in found:
            found[id(each)] = each
            waiting.extend(each.values() if isinstance(each, dict) else each)
    return iter(found.values())
