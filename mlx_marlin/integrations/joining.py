"""Finds a model's layers that share x, and joins them."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.joined import MarlinPart, can_join, join, separate

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
    """Makes layers of their own of all that `join_layers` joined."""
    for module in _modules(model):
        for names in SHARING:
            parts: list[Any] = [module.get(name) for name in names]
            if all(isinstance(part, MarlinPart) for part in parts):
                layers = separate(parts[0].shared)
                mx.eval(layers)
                for name, layer in zip(names, layers, strict=True):
                    module[name] = layer


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
