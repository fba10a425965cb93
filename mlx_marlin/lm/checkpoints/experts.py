"""Stacks experts that a checkpoint stores one by one.

mlx-lm's models do so in `sanitize`, some of them for `LAYER.weight` alone. What they do
to a weight is right for the other arrays of a quantized layer too.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

PARTS = ("scales", "biases", "global_scale", "input_order", "bias")
"""Arrays of a quantized layer beside its weight."""
EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.(\w+)")
"""Layer of experts, number, projection and part, as Hugging Face's models have them."""
STACKED = ("switch_mlp", "experts.switch_glu")
"""Modules of mlx-lm's models that hold stacked experts, beside `experts`."""

Arrays = dict[str, mx.array]


def add_orders(arrays: Arrays, columns: Mapping[str, int]) -> None:
    """Gives each expert an order of its columns if any layer has one.

    Args:
        arrays: Arrays by their names; changed in place.
        columns: Columns of the quantized layers.
    """
    if not any(name.endswith(".input_order") for name in arrays):
        return
    for layer, k in columns.items():
        if ".experts." in layer:
            arrays.setdefault(f"{layer}.input_order", mx.arange(k, dtype=mx.int32))


def move_parts(
    stored: Mapping[str, mx.array],
    renamed: Arrays,
    sanitize: Callable[[Arrays], Arrays],
) -> None:
    """Moves the arrays of layers to where a model's `sanitize` has moved their weights.

    Each kind of array is given to it once more as if it were the weights.

    Args:
        stored: Arrays by their names in a checkpoint.
        renamed: The same after `sanitize`; changed in place.
        sanitize: That of a model.
    """
    moved = [
        name.removesuffix(".weight")
        for name in stored
        if name.endswith(".weight") and name not in renamed
    ]
    for part in PARTS:
        own = {
            f"{layer}.weight": renamed.pop(f"{layer}.{part}")
            for layer in moved
            if f"{layer}.{part}" in renamed
        }
        for name, array in sanitize(own).items() if own else ():
            renamed[f"{name.removesuffix('.weight')}.{part}"] = array


def stack(arrays: Arrays, layer: Callable[[str], Any]) -> None:
    """Stacks experts that `sanitize` has left as they are: Qwen 3.5's and Gemma 4's.

    Args:
        arrays: Arrays by mlx-lm's names; changed in place.
        layer: Returns the layer of the model that has a name, or None.
    """
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for name in arrays:
        if (parts := EXPERT.fullmatch(name)) is not None:
            for stacked in STACKED:
                target = f"{parts[1]}.{stacked}.{parts[3]}"
                if layer(target) is not None:
                    found[f"{target}.{parts[4]}"][int(parts[2])] = name
    for target, names in found.items():
        own = [arrays.pop(names[expert]) for expert in sorted(names)]
        arrays[target] = mx.stack(own)


def shared_order(order: mx.array) -> mx.array | None:
    """Returns the order of columns of a layer, which all its experts have.

    None stands for columns in the order of x.

    Args:
        order: int32 [k], or [experts, k].

    Raises:
        ValueError: If experts have different orders.
    """
    if order.ndim == 2 and not mx.all(order == order[:1]):
        raise ValueError(
            "experts have columns in different orders (act-order), and all experts of "
            "a layer read the same features: quantize the model again without desc_act"
        )
    first = order[0] if order.ndim == 2 else order
    is_in_order = mx.array_equal(first, mx.arange(first.size, dtype=mx.int32))
    return None if is_in_order else first
