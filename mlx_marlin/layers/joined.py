"""Layers with the same input, computed as one product: q, k and v, or gate and up."""

from collections.abc import Sequence
from itertools import accumulate
from operator import is_
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.layers.guarded_parameters import (
    GLOBAL_SCALE,
    NATIVE,
    GuardedParameters,
    without_parameters,
)
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.planning.epilogue import MOST_PARTS

Kept = tuple[mx.array | None, list[mx.array], dict[int, mx.array]]
"""The last x, the parameters, and the results that no layer has returned yet."""
NOTHING: Kept = (None, [], {})


class Joined:
    """The product of several layers, kept until all of them have returned their
    part."""

    def __init__(self, layer: MarlinLinear, sizes: Sequence[int]) -> None:
        self.layer = layer
        self.sizes = tuple(sizes)
        self._kept = NOTHING

    def part(self, x: mx.array, index: int) -> mx.array:
        """Returns one layer's result; the first call computes those of all layers.

        A call computes them again if x or a parameter is another array, or if the same
        layer is called a second time.
        """
        known, arrays, waiting = self._kept
        layer = self.layer
        # `mx.compile` replaces parameters without calling a method of the layer.
        if (
            x is not known
            or index not in waiting
            or len(arrays) != len(layer)
            or not all(map(is_, arrays, layer.values()))
        ):
            waiting = dict(enumerate(layer.parts(x, self.sizes)))
            self._kept = x, [*layer.values()], waiting
        y = waiting.pop(index)
        if not waiting:
            self._kept = NOTHING
        return y


class MarlinPart(GuardedParameters, nn.QuantizedLinear):
    """One of several linear layers that share x and are computed together.

    It is an `nn.QuantizedLinear`. Reading `weight`, `scales`, `biases` or `bias`
    computes them from the joined layer, so that adapters can wrap it. The first part
    holds the joined layer as "joined", with the parameters of all parts. `modules` does
    not list that layer, because replacing it would have no effect.

    x must not be changed in place between the calls of the parts.
    """

    def __init__(self, joined: Joined, index: int) -> None:
        nn.Module.__init__(self)
        layer = joined.layer
        self.group_size, self.bits, self.mode = layer.group_size, layer.bits, layer.mode
        self.train(layer.training)
        # One set for all parts: `freeze` and `unfreeze` change it in place.
        self._no_grad = layer._no_grad
        self.index = index
        if index == 0:
            self["joined"] = layer
        self.shared = joined

    def __call__(self, x: mx.array) -> mx.array:
        """Returns the layer's product [..., n] of x [..., k], with its bias if any."""
        return self.shared.part(x, self.index)

    def __getattr__(self, name: str) -> Any:
        is_shared = name in (*NATIVE, "bias") and "shared" in vars(self)
        if not is_shared or (name == "bias" and name not in self):
            return super().__getattr__(name)
        array = getattr(self.shared.layer, name)
        return None if array is None else self._own_rows(array)

    def stored(self) -> str | None:
        """Returns how the parameters differ from MLX's own."""
        return f"joined with {len(self.shared.sizes) - 1} other layers (join=True)"

    def children(self) -> dict[str, Any]:
        """Returns no modules: tools must not find the joined layer."""
        return {}

    def _own_rows(self, array: mx.array) -> mx.array:
        sizes = self.shared.sizes
        first = sum(sizes[: self.index])
        return array[first : first + sizes[self.index]]

    def _set_training_mode(self, mode: bool) -> None:
        super()._set_training_mode(mode)
        shared = vars(self).get("shared")  # absent in __init__
        if shared is not None:
            shared.layer._set_training_mode(mode)

    def _validate_keys(self, keys: Any, strict: bool) -> Any:
        # MLX finds no arrays to freeze in the part itself.
        joined = self.shared.layer
        return [*joined] if keys == [] else super()._validate_keys(keys, strict)

    def __contains__(self, name: object) -> bool:
        # Tools check for a bias by `"bias" in layer`.
        if name == "bias" and "shared" in vars(self):
            return "bias" in self.shared.layer
        return super().__contains__(name)

    def __missing__(self, name: str) -> mx.array:
        if name == "bias" and name in self:
            return self._own_rows(self.shared.layer[name])
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if "shared" in vars(self) and value is not self.shared.layer:
            raise ValueError(
                f"{name!r} cannot be set: {type(self).__name__} is {self.stored()}; "
                "call mlx_marlin.restore(model) first"
            )
        super().__setitem__(name, value)

    def _extra_repr(self) -> str:
        features = self.shared.sizes[self.index]
        return f"output_dims={features}, part {self.index} of {len(self.shared.sizes)}"


def whole(layer: nn.Module) -> nn.Module:
    """Returns the layer that computes a layer: the joined one of a part."""
    return layer.shared.layer if isinstance(layer, MarlinPart) else layer


def can_join(layers: Sequence[nn.Module]) -> bool:
    """Returns whether layers differ only in their rows."""
    if not 2 <= len(layers) <= MOST_PARTS:
        return False
    if any(type(layer) is not MarlinLinear for layer in layers):
        return False
    return len({_format(layer) for layer in layers}) == 1


def join(layers: Sequence[MarlinLinear]) -> list[MarlinPart]:
    """Joins several layers to one product, exactly."""
    if not can_join(layers):
        given = ", ".join(str(layer) for layer in layers)
        raise ValueError(
            f"layers must be 2 to {MOST_PARTS} MarlinLinear of one input, format, "
            f"layout and dtype, all with a bias or none, got {given}"
        )
    rows = [_rows(layer) for layer in layers]
    whole = {name: mx.concatenate([own[name] for own in rows]) for name in rows[0]}
    joined = Joined(_layer(layers[0], whole), [len(own["weight"]) for own in rows])
    return [MarlinPart(joined, index) for index in range(len(rows))]


def separate(joined: Joined) -> list[MarlinLinear]:
    """Returns the layers that were joined: the inverse of `join`."""
    layer = joined.layer
    whole = _rows(layer)
    parts = []
    for end, size in zip(accumulate(joined.sizes), joined.sizes, strict=True):
        own = slice(end - size, end)
        rows = {name: mx.contiguous(array[own]) for name, array in whole.items()}
        parts.append(_layer(layer, rows))
    return parts


def _format(layer: nn.Module) -> tuple[object, ...]:
    packed = layer.layout == "marlin"
    scales = layer["packed_scales" if packed else "scales"]
    columns = layer.input_dims if packed else layer["weight"].shape[-1]
    bias = layer["bias"].dtype if "bias" in layer else None
    scale = layer[GLOBAL_SCALE][0].item() if GLOBAL_SCALE in layer else None
    table = None if layer.packed is None else layer.packed.codebook
    codebook = None if table is None else str(table.tolist())
    format = layer.mode, layer.bits, layer.group_size, scale, codebook
    return columns, *format, layer.layout, layer.invariant, scales.dtype, bias


def _rows(layer: MarlinLinear) -> dict[str, mx.array]:
    """Returns a layer's arrays in MLX's layout, which have a row for each feature."""
    arrays = dict(zip(NATIVE, layer.native(), strict=True)) | {
        "bias": layer.get("bias")
    }
    return {name: array for name, array in arrays.items() if array is not None}


def _layer(like: MarlinLinear, rows: dict[str, mx.array]) -> MarlinLinear:
    """Returns a layer of the same format and layout with other rows."""
    layer = without_parameters(MarlinLinear, like)
    layer.invariant = like.invariant
    for name in NATIVE:
        setattr(layer, name, rows.get(name))
    if "bias" in rows:
        layer["bias"] = rows["bias"]
    packed = like.packed
    if packed is not None:
        layer.keep_packed(packed.global_scale, packed.codebook)
    return layer
