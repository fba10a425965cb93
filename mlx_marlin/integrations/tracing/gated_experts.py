"""Decides whether gate, up and gating of experts are fused into one kernel."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from mlx_marlin.backends import selection
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.products.experts.matmul import gather_gated


class GatedExperts(SwitchGLU):
    """Replacement for mlx-lm's `SwitchGLU` in traced graphs.

    Our CUDA kernels do not need rows sorted by expert, and compute gate and up in one
    launch. Stock MLX, if it serves the products (activations in float32, for example),
    gets the rows unsorted too.
    """

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Returns the results of the experts of each row [..., choices, k]."""
        return self.results(x, indices).squeeze(-2)

    def results(self, x: mx.array, indices: mx.array) -> mx.array:
        """Returns the same as [..., choices, 1, k], without the host time of a view.

        Args:
            x: Activations [..., k].
            indices: Experts of each row [..., choices]. They have no derivative.
        """
        layers: list[Any] = [self.gate_proj, self.up_proj, self.down_proj]
        ours = all(type(layer) is MarlinSwitchLinear for layer in layers)
        if selection.backend() != "cuda" or not ours:
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
    formats = [
        (layer._n, layer._k, layer.group_size, layer.bits, layer.mode)
        for layer in (gate, up)
        if layer.layout == "marlin" and not layer.invariant
    ]
    biases = tuple(layer["bias"] for layer in (gate, up) if "bias" in layer)
    if len(formats) < 2 or formats[0] != formats[1] or len(biases) == 1:
        return None
    weights = gate["words"], gate["quantizers"], up["words"], up["quantizers"]
    if weights[1].dtype != weights[3].dtype:
        return None
    return gather_gated(x, weights, *formats[0], indices, gating, biases)
