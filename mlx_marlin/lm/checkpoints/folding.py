"""Folds the column order of down projections into the layers that produce their input.

GPTQ with act-order sorts the columns of each weight, and the layer gathers x in that
order. In an MLP, gate and up can produce their outputs in the order of down instead:
rows of their weights are moved, which changes no number.
"""

import mlx.core as mx

MODULES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")
"""mlx-lm's modules whose MLP is down(f(gate(x), up(x))), with f by element.

A test compares each with its gathered form."""
PRODUCERS = ("gate_proj", "up_proj")
CONSUMER = "down_proj"
ROWS = ("weight", "scales", "biases", "bias")
"""Arrays of a layer of which each row belongs to an output."""


def fold_orders(arrays: dict[str, mx.array], module: str) -> set[str]:
    """Moves the rows of gate and up projections, and drops the order of down.

    Nothing is moved if gate or up takes x as it is: mlx-lm would put an adapter of the
    original model on such a layer, whose outputs are then in another order. It raises
    an error for a layer that gathers.

    Args:
        arrays: Arrays of a model by mlx-lm's names, with `LAYER.input_order` for
            layers with act-order; changed in place.
        module: Name of the model's module in mlx-lm, such as "llama".

    Returns:
        The down projections whose order was folded.
    """
    folded: set[str] = set()
    if module not in MODULES:
        return folded
    suffix = f".mlp.{CONSUMER}.input_order"
    for name in [name for name in arrays if name.endswith(suffix)]:
        layer = name.removesuffix(".input_order")
        mlp = layer.removesuffix(f".{CONSUMER}")
        if all(
            _can_move(arrays, f"{mlp}.{part}", arrays[name].size) for part in PRODUCERS
        ):
            order = arrays.pop(name)
            for part in PRODUCERS:
                _move(arrays, f"{mlp}.{part}", order)
            folded.add(layer)
    return folded


def _can_move(arrays: dict[str, mx.array], layer: str, rows: int) -> bool:
    """Returns whether a layer gathers its own input and has so many outputs."""
    own = [arrays[f"{layer}.{part}"] for part in ROWS if f"{layer}.{part}" in arrays]
    return f"{layer}.input_order" in arrays and all(len(a) == rows for a in own)


def _move(arrays: dict[str, mx.array], layer: str, order: mx.array) -> None:
    for part in ROWS:
        name = f"{layer}.{part}"
        if name in arrays:
            arrays[name] = mx.take(arrays[name], order, axis=0)
