"""Experts in traced blocks: gate and up in one product, routing and their sum."""

from functools import cache
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import SwigluOAI, swiglu
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm.known_layers import is_routing_fused
from mlx_marlin.lm.tracing.model_families import Experts
from mlx_marlin.lm.tracing.routing import choose_experts, has_kernel, weighted_sum
from mlx_marlin.products.experts import gather_gated

SHARED = ("shared_expert", "shared_expert_gate")
"""Names of the shared expert and its gate in mixtures with a routing rule."""


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


class RoutedExperts(nn.Module):
    """Mixture of experts whose routing and weighted sum run as kernels, if possible.

    Each class of mlx-lm has a subclass of this class and of that one. Elsewhere its own
    code runs.
    """

    known: ClassVar[Experts]

    def added(self, x: mx.array, residual: mx.array, fuse: frozenset[str]) -> mx.array:
        """Returns the residual plus the result of the experts.

        `x`: activations [..., k].
        `residual`: residual [..., n].
        """
        layers = self[self.known.layers]
        layers.fused = "experts" in fuse
        for child in self.values():
            if isinstance(child, SharedExpert):
                child.fused = "gate" in fuse
        fused = (
            "experts" in fuse
            and is_routing_fused()
            and not layers.has_invariant_layers()
        )
        total = self._by_kernels(x, residual) if fused else None
        return residual + self(x) if total is None else total

    def _by_kernels(self, x: mx.array, residual: mx.array) -> mx.array | None:
        """Returns the same by kernels; None if unsupported, or if dtypes differ."""
        known = self.known
        if known.routing is None:
            return None
        logits, routing = self[known.router](x), known.routing(self)
        if not has_kernel(logits, routing):
            return None
        experts, scores = choose_experts(logits, routing)
        results = self[known.layers].results(x, experts)
        if known.shared is not None:
            shared, gate = (self[name] for name in SHARED)
            residual = residual + mx.sigmoid(gate(x)) * shared(x)
        if len({array.dtype for array in (x, logits, results, residual)}) > 1:
            return None
        return weighted_sum(results, scores, residual)


class SharedExpert(nn.Module):
    """Gated MLP that all rows use. Gate and up may be joined."""

    fused = True
    """Whether joined gate, up and gating may be one kernel."""

    def __call__(self, x: mx.array) -> mx.array:
        """Returns the result for x [..., k]."""
        if "joined" in self:
            layer: MarlinLinear = self["joined"]
            y = layer.gated(x) if self.fused else swiglu(*layer.halves(x))
        else:
            y = swiglu(self["gate_proj"](x), self["up_proj"](x))
        down: mx.array = self["down_proj"](y)
        return down


def check_names(experts: nn.Module, known: Experts) -> None:
    """Checks that a mixture has what `RoutedExperts` uses."""
    names = [known.layers]
    if known.routing is not None:
        known.routing(experts)
        names += [known.router, *(SHARED if known.shared else ())]
    for name in names:
        if name not in experts:
            raise AttributeError(f"{type(experts).__name__} has no layer {name!r}")


@cache
def routed(cls: type[nn.Module], known: Experts) -> type[RoutedExperts]:
    """Returns the subclass of `RoutedExperts` for one of mlx-lm's classes."""
    return type(f"Routed{cls.__name__}", (RoutedExperts, cls), {"known": known})
