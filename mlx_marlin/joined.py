"""Layers with the same input as one product: q, k and v, or gate and up."""

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.epilogue import MOST_PARTS
from mlx_marlin.native_layer import NATIVE, twin
from mlx_marlin.nn import MarlinLinear


class Joined:
    """The product of several layers, kept until each has taken its part.

    Args:
        layer: One layer with the rows of all.
        sizes: Features that come out of each.
    """

    def __init__(self, layer: MarlinLinear, sizes: Sequence[int]) -> None:
        self.layer = layer
        self.sizes = tuple(sizes)
        self._kept: tuple[mx.array | None, dict[int, mx.array]] = (None, {})

    def part(self, x: mx.array, index: int) -> mx.array:
        """Returns one layer's result; the first to ask has those of all computed.

        Whoever asks with another x, or for the same part again, starts anew.
        """
        known, waiting = self._kept
        if x is not known or index not in waiting:
            waiting = dict(enumerate(self.layer.parts(x, self.sizes)))
            self._kept = x, waiting
        y = waiting.pop(index)
        if not waiting:
            self._kept = None, {}  # hold on to nothing
        return y


class MarlinPart(nn.Module):
    """One of several linear layers that share x and are computed together.

    The first of them owns the parameters of all. Between the calls with one x, that
    array must not be changed in place.
    """

    def __init__(self, joined: Joined, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index = index
        self.shared = joined
        if index == 0:
            self.joined = joined.layer

    def __call__(self, x: mx.array) -> mx.array:
        """Returns the layer's product [..., n] of x [..., k], with its bias if any."""
        return self.shared.part(x, self.index)

    def _extra_repr(self) -> str:
        features = self.shared.sizes[self.index]
        return f"output_dims={features}, part {self.index} of {len(self.shared.sizes)}"


def can_join(layers: Sequence[nn.Module]) -> bool:
    """Returns whether layers differ in their rows only."""
    if not 2 <= len(layers) <= MOST_PARTS:
        return False
    if any(type(layer) is not MarlinLinear for layer in layers):
        return False
    return len({_kind(layer) for layer in layers}) == 1


def join(layers: Sequence[MarlinLinear]) -> list[MarlinPart]:
    """Makes one product of several layers, exactly.

    Args:
        layers: 2 to 6 layers with the same input; they stay as they are.

    Returns:
        What takes the place of each.

    Raises:
        ValueError: If the layers differ in more than their rows.
    """
    if not can_join(layers):
        kinds = ", ".join(str(layer) for layer in layers)
        raise ValueError(
            f"layers must be 2 to {MOST_PARTS} MarlinLinear of one input, format, "
            f"layout and dtype, all with a bias or none, got {kinds}"
        )
    rows = [_rows(layer) for layer in layers]
    whole = {name: mx.concatenate([each[name] for each in rows]) for name in rows[0]}
    joined = Joined(_layer(layers[0], whole), [len(each["weight"]) for each in rows])
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


def _kind(layer: nn.Module) -> tuple[object, ...]:
    packed = layer.layout == "marlin"
    scales = layer["quantizers" if packed else "scales"]
    columns = layer.input_dims if packed else layer["weight"].shape[-1]
    bias = layer["bias"].dtype if "bias" in layer else None
    format = layer.mode, layer.bits, layer.group_size
    return columns, *format, layer.layout, layer.invariant, scales.dtype, bias


def _rows(layer: MarlinLinear) -> dict[str, mx.array]:
    """Returns a layer's arrays in MLX's layout: each has a row for each feature."""
    arrays = dict(zip(NATIVE, layer.native(), strict=True)) | {
        "bias": layer.get("bias")
    }
    return {name: array for name, array in arrays.items() if array is not None}


def _layer(like: MarlinLinear, rows: dict[str, mx.array]) -> MarlinLinear:
    """Returns a layer of the same kind and layout with other rows."""
    layer = twin(MarlinLinear, like)
    layer.layout, layer.invariant = "mlx", like.invariant
    for name, array in rows.items():
        layer[name] = array
    if like.layout == "marlin":
        layer.keep_packed()
    return layer
