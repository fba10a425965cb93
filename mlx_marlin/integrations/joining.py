"""Finds a model's layers that share x, and joins them."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.joined import MarlinPart, can_join, join, separate

Place = tuple[Any, Any]
"""A module, dictionary or list, and a key of it."""

SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that take the same x in the models of mlx-lm."""


def join_layers(model: nn.Module) -> None:
    """Joins the layers of a model that share x, wherever their kinds allow it.

    Args:
        model: A model whose linear layers are converted already.
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
                for name, part in zip(names, parts, strict=True):
                    module[name] = part


def separate_layers(model: nn.Module) -> None:
    """Makes layers of their own of all that `join_layers` joined.

    They are found wherever they are, such as in adapters.
    """
    groups: dict[int, list[Place]] = {}
    for container in _containers(model):
        pairs = (
            enumerate(container) if isinstance(container, list) else container.items()
        )
        for key, child in pairs:
            if isinstance(child, MarlinPart):
                groups.setdefault(id(child.shared), []).append((container, key))
    for places in groups.values():
        _separate(places)


def _separate(places: list[Place]) -> None:
    """Replaces the parts of one product by layers."""
    container, key = places[0]
    layers = separate(container[key].shared)
    mx.eval(layers)
    for container, key in places:
        container[key] = layers[container[key].index]


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
