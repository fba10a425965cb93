"""Mixtures of experts in traced graphs: routing and weighted sum as kernels."""

from functools import cache
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm.known_layers import is_routing_fused
from mlx_marlin.lm.tracing.model_families import Experts
from mlx_marlin.lm.tracing.routing import choose_experts, has_kernel, weighted_sum

SHARED = ("shared_expert", "shared_expert_gate")
"""Names of the shared expert and its gate in mixtures with a routing rule."""


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
