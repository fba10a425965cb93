"""Decides whether gate, up and gating of experts are fused into one kernel."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.products.experts import gather_gated


class GatedExperts(SwitchGLU):
    """Replacement for mlx-lm's `SwitchGLU` in traced graphs.

    A kernel that computes gate and up in one launch does not need rows sorted by
    expert. Stock MLX, if it serves the products (activations in float32, for example),
    gets the rows unsorted too.
    """

    fused = True
    """Whether gate, up and gating may be one kernel."""

    def has_invariant_layers(self) -> bool:
        """Returns whether the bits of a row must be those of calls with many rows."""
        layers = self.gate_proj, self.up_proj, self.down_proj
        return any(getattr(layer, "invariant", False) for layer in layers)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Returns the results of the experts of each row [..., choices, k]."""
        return self.results(x, indices).squeeze(-2)

    def results(self, x: mx.array, indices: mx.array) -> mx.array:
        """Returns the same as [..., choices, 1, k], without the host time of a view.

        `x`: activations [..., k].
        `indices`: experts of each row [..., choices]. They have no derivative.
        """
        layers: list[Any] = [self.gate_proj, self.up_proj, self.down_proj]
        are_marlin = all(type(layer) is MarlinSwitchLinear for layer in layers)
        if not are_marlin or not self.fused:
            own: mx.array = super().__call__(x, indices)
            return mx.expand_dims(own, -2)
        gate, up, down = layers
        gating = _gating(self.activation)
        y = None if gating is None else _gated(gate, up, x, indices, gating)
        if y is None:
            x = mx.expand_dims(x, (-2, -3))
            y = self.activation(up(x, indices), gate(x, indices))
        result: mx.array = down(y, indices)
        return result


def _gating(activation: nn.Module) -> str | None:
    """Returns the kernels' name of an activation, or None if they do not have it."""
    if type(activation) is SwiGLU:
        return "silu"
    if type(activation) is not SwigluOAI:
        return None
    known = activation._alpha == 1.702 and activation._limit == 7
    return "swiglu_oai" if known else None


def _gated(
    gate: MarlinSwitchLinear,
    up: MarlinSwitchLinear,
    x: mx.array,
    indices: mx.array,
    gating: str,
) -> mx.array | None:
    """Returns the gated product as one launch; None if the formats differ."""
    first, second = gate.packed, up.packed
    if first is None or second is None or gate.invariant or up.invariant:
        return None
    biases = tuple(layer["bias"] for layer in (gate, up) if "bias" in layer)
    if first.kind != second.kind or len(biases) == 1:
        return None
    return gather_gated(x, first, second, indices, gating, biases)
