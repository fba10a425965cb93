"""Experts in traced blocks: routing, gate and up in one product, and their sum."""

from functools import cache
from math import prod
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import SwigluOAI, swiglu
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from mlx_marlin import guard
from mlx_marlin.backends import graph, selection
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm.known_layers import is_routing_fused
from mlx_marlin.lm.tracing.model_families import Experts, Routing
from mlx_marlin.planning.block_plans import CombinePlan, RoutePlan
from mlx_marlin.products.autodiff import are_without_vjp, differentiable
from mlx_marlin.products.experts import gather_gated
from mlx_marlin.weights.dtypes import dtype_name


def has_kernel(logits: mx.array, routing: Routing) -> bool:
    """Returns whether the routing kernel supports these logits and this rule."""
    if logits.size == 0:
        return False
    plan = _plan(logits, routing)
    if RoutePlan not in selection.traits().launches or not plan.is_possible:
        return False
    known = plan.dtype in selection.traits().dtypes
    return known and guard.remembered_fault(plan) is None


def choose_experts(logits: mx.array, routing: Routing) -> tuple[mx.array, mx.array]:
    """Runs the routing kernel.

    `logits`: router logits [..., experts] that `has_kernel` accepts.
    """
    run = graph.call(_plan(logits, routing))
    if are_without_vjp():
        experts, scores = run(logits)
        return experts, scores
    experts, _ = run(mx.stop_gradient(logits))
    return experts, scores_of(logits, experts, routing)


def _plan(logits: mx.array, routing: Routing) -> RoutePlan:
    *rows, experts = logits.shape
    dtype = dtype_name(logits.dtype)
    how = routing.choices, routing.of_all, routing.last
    return RoutePlan(prod(rows), dtype, experts, *how)


def weighted_sum(results: mx.array, scores: mx.array, residual: mx.array) -> mx.array:
    """Returns the residual plus the sum of the experts' results times their scores.

    `results`: results of the chosen experts [..., choices, 1, n], in a dtype that the
    kernels support.
    `scores`: scores in float32 [..., choices].
    `residual`: residual [..., n], in the dtype of `results`.
    """
    *rows_shape, choices, _, n = results.shape
    if scores.shape != (*rows_shape, choices) or residual.shape != (*rows_shape, n):
        raise ValueError(
            f"results {results.shape}, scores {scores.shape} and residual "
            f"{residual.shape}, expected [..., choices, 1, n], [..., choices], [..., n]"
        )
    rows = residual.size // n
    plan = CombinePlan(rows, dtype_name(results.dtype), n, choices)
    if guard.remembered_fault(plan):
        return stock_sum(results, scores, residual)
    call = differentiable(graph.call(plan), stock_sum)
    return call(results, scores, residual)


def scores_of(logits: mx.array, experts: mx.array, routing: Routing) -> mx.array:
    """Returns the scores of chosen experts, as differentiable MLX operations."""
    logits = logits.astype(mx.float32)
    if routing.of_all:
        return mx.take_along_axis(mx.softmax(logits, axis=-1), experts, axis=-1)
    return mx.softmax(mx.take_along_axis(logits, experts, axis=-1), axis=-1)


def stock_sum(results: mx.array, scores: mx.array, residual: mx.array) -> mx.array:
    """Does what `weighted_sum` does, as MLX operations."""
    weighted = results.astype(mx.float32) * scores[..., None, None]
    total = weighted.sum(axis=(-3, -2))
    return (residual.astype(mx.float32) + total).astype(results.dtype)


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
