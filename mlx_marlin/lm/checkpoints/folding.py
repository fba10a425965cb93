"""Folds the column order of down projections into the layers that produce their input.

GPTQ with act-order sorts the columns of each weight, and the layer gathers x in that
order. In an MLP, gate and up can produce their outputs in the order of down instead:
rows of their weights are moved, which changes no number.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_marlin.checkpoints.stored_weight import StoredWeight

MODULES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")
"""mlx-lm's modules whose MLP is down(f(gate(x), up(x))), with f by element.

A test compares each with its gathered form."""
PRODUCERS = ("gate_proj", "up_proj")
CONSUMER = "down_proj"


def fold_orders(
    weights: dict[str, StoredWeight], arrays: dict[str, mx.array], module: str
) -> set[str]:
    """Moves the rows of gate and up projections, and drops the order of down.

    Nothing is moved if gate or up takes x as it is: mlx-lm would put an adapter of the
    original model on such a layer, whose outputs are then in another order. It raises
    an error for a layer that gathers.

    Weights are by layer, other arrays by name, as mlx-lm has them; both are changed in
    place. Returns the down projections whose order was folded.
    """
    folded: set[str] = set()
    if module not in MODULES:
        return folded
    for layer, weight in [*weights.items()]:
        mlp, _, name = layer.rpartition(".mlp.")
        order = weight.input_order
        producers = [f"{mlp}.mlp.{part}" for part in PRODUCERS]
        if name != CONSUMER or order is None:
            continue
        if all(_can_move(weights, arrays, each, order.size) for each in producers):
            weights[layer] = replace(weight, input_order=None)
            for each in producers:
                _move(weights, arrays, each, order)
            folded.add(layer)
    return folded


def _can_move(
    weights: dict[str, StoredWeight], arrays: dict[str, mx.array], layer: str, rows: int
) -> bool:
    """Returns whether a layer gathers its own input and has so many outputs."""
    weight, bias = weights.get(layer), arrays.get(f"{layer}.bias")
    if weight is None or weight.input_order is None:
        return False
    return len(weight.codes) == rows and (bias is None or len(bias) == rows)


def _move(
    weights: dict[str, StoredWeight],
    arrays: dict[str, mx.array],
    layer: str,
    order: mx.array,
) -> None:
    weight = weights[layer]
    parts: dict[str, Any] = {
        part: mx.take(array, order, axis=0)
        for part in ("codes", "scales", "biases")
        if (array := getattr(weight, part)) is not None
    }
    weights[layer] = replace(weight, **parts)
    if (bias := arrays.get(f"{layer}.bias")) is not None:
        arrays[f"{layer}.bias"] = mx.take(bias, order, axis=0)
