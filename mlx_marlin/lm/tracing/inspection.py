"""Decides whether a decoder block of mlx-lm can be traced, and finds its arrays.

`inspect` compares the modules of a block with those that mlx-lm's own code makes for
its family. A block that differs, for example by a LoRA layer, runs its own code.
"""

import sys
from dataclasses import dataclass, replace
from operator import getitem
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import switch_layers
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_marlin import state
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm.tracing.attention import rope_of
from mlx_marlin.lm.tracing.block_spec import (
    SCALARS,
    BlockSpec,
    ModuleSpecs,
    NotTraceableError,
    Shape,
    Slots,
    Snapshot,
    Structure,
    are_original,
    children_of,
    specs_of,
    take_snapshot,
)
from mlx_marlin.lm.tracing.experts import (
    GatedExperts,
    SharedExpert,
    check_names,
    routed,
)
from mlx_marlin.lm.tracing.model_families import (
    Family,
    Merge,
    ScaledResidualSum,
    family_of,
)
from mlx_marlin.lm.tracing_code import report_untraced
from mlx_marlin.warn_once import warn_once

ATTENTION = "self_attn"
"""Name of the attention in a block."""
LINEARS = (MarlinLinear, nn.QuantizedLinear, nn.Linear)
EXPERT_PARTS = (
    *LINEARS,
    MarlinSwitchLinear,
    switch_layers.QuantizedSwitchLinear,
    switch_layers.SwitchLinear,
    switch_layers.SwitchGLU,
    switch_layers.SwiGLU,
    SwigluOAI,
    nn.Sigmoid,
    nn.Softmax,
)
"""Classes of the modules in a mixture of experts, except the shared expert."""
MOST_SPECS = 1024
"""Capacity of the table of block specs of a process. Entries are never removed, and
each changed setting adds one."""
TOO_MANY = (
    f"decoder blocks with new settings are not traced, because {MOST_SPECS} different "
    f"blocks have been: call optimize(model, trace=False) if settings keep changing"
)


@dataclass(slots=True)
class Inspection:
    """Result of the inspection of a block."""

    snapshot: Snapshot  # The state of the block when it was inspected
    spec: BlockSpec | None  # The block's spec. None if the block cannot be traced
    before: Slots = ((), ())  # Where the arrays of the graph before attention are
    after: Slots = ((), ())  # Where the arrays of the graph after attention are
    windowed: bool = False  # Whether the block's mask may hide distant tokens
    scale: float = 1.0  # Factor of the attention scores
    reason: str | None = None  # Why the block cannot be traced; None if it can

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the block is inspected again

    def arrays(self) -> tuple[list[mx.array], list[mx.array]]:
        """Returns the arrays of the graphs before and after attention."""
        return [*map(getitem, *self.before)], [*map(getitem, *self.after)]


def inspect(block: nn.Module) -> Inspection:
    """Inspects a traced block, whose second base class is mlx-lm's."""
    cls: Any = type(block).__bases__[1]
    found = _inspected(block, cls)
    spec = found.spec
    if spec is None:
        return found
    if spec not in _specs and len(_specs) >= MOST_SPECS:
        warn_once("too many specs", TOO_MANY)
        return Inspection(found.snapshot, None)
    found.spec = _specs.setdefault(spec, spec)
    return found


def why_untraced(block: nn.Module, cls: type[nn.Module]) -> str | None:
    """Returns why a block of a class in `FAMILIES` cannot be traced, or None."""
    return _inspected(block, cls).reason


def _inspected(block: nn.Module, cls: type[nn.Module]) -> Inspection:
    """Inspects a block of a class; warns if mlx-lm has renamed something."""
    snapshot = take_snapshot(block, cls, "_inspection")
    own = sys.modules[cls.__module__]
    try:
        if not are_original(snapshot.lookups):
            raise NotTraceableError("a method or function that it calls was replaced")
        family = family_of(own)
        traced = _spec(block, family, own)
        scale = getattr(block[ATTENTION], family.scale)
        return Inspection(snapshot, *traced, family.windowed(block), scale)
    except NotTraceableError as error:
        reason = str(error)
    except KeyError as error:
        reason = f"it has no {error.args[0]}"
    except AttributeError as error:
        reason = str(error)
        report_untraced(reason, f"decoder blocks of {cls.__module__}")
    return Inspection(snapshot, None, reason=reason)


class _Specs(dict[BlockSpec, BlockSpec]):
    """The specs of this process; blocks keep references to them."""

    def clear(self) -> None:
        """Drops the graphs of all specs, and keeps the specs."""
        for spec in list(self):
            spec.graphs.clear()


_specs: dict[BlockSpec, BlockSpec] = state.register(_Specs())


def _spec(
    block: nn.Module, family: Family, own: ModuleType
) -> tuple[BlockSpec, Slots, Slots]:
    """Returns a block's spec, and where the arrays of both graphs are."""
    attention = block[ATTENTION]
    _checked(attention, getattr(own, family.attention))
    home: Any = sys.modules[type(attention).__module__]
    if home.scaled_dot_product_attention is not scaled_dot_product_attention:
        # It was patched when this module was imported.
        raise NotTraceableError("mlx-lm's attention was replaced")
    heads, kv_heads = (getattr(attention, name) for name in family.heads)
    qkv, q_k_v = _attention_layers(attention, heads, kv_heads)
    norms, norms_after = _norms(block, attention, family, own)
    rope = rope_of(attention)
    before, before_slots = specs_of({**norms, **q_k_v, "rope": rope}, _structure)
    o_proj = _checked(attention["o_proj"], *LINEARS)
    mlp = block[family.mlp_name]
    after, after_slots = _after({**norms_after, "o_proj": o_proj}, mlp, family, own)
    spec = BlockSpec(
        heads,
        kv_heads,
        before=before,
        after=after,
        qkv=qkv,
        add=_residual_sum(block, family, own),
        gating=family.gating,
        output_gate=family.output_gate,
        fuse=getattr(type(block), "fused_operations", frozenset()),
    )
    return spec, before_slots, after_slots


def _norms(
    block: nn.Module, attention: nn.Module, family: Family, own: ModuleType
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Returns the norms of both graphs, by the names that `fusion` uses."""
    cls = nn.RMSNorm if family.norm is None else getattr(own, family.norm)
    first, second = (
        _checked(block[name], cls) if name else nn.Identity() for name in family.norms
    )
    before, after = {"norm": first}, {"norm": second}
    for name in ("q_norm", "k_norm"):
        if name in attention:
            before[name] = _checked(attention[name], cls)
    o_norm, down_norm = family.output_norms
    if o_norm:
        after["o_norm"] = _checked(block[o_norm], cls)
    if down_norm:
        after["down_norm"] = _checked(block[down_norm], cls)
    return before, after


def _residual_sum(block: nn.Module, family: Family, own: ModuleType) -> Merge | None:
    """Returns how results are added to the residual. None for a plain sum."""
    add = None if family.add is None else family.add(block, own)
    if isinstance(add, ScaledResidualSum) and type(add.factor) not in SCALARS:
        raise NotTraceableError("the factor of its residual sum may change")
    return add


def _after(
    modules: dict[str, nn.Module], mlp: nn.Module, family: Family, own: ModuleType
) -> tuple[ModuleSpecs, Slots]:
    """Returns the specs after attention: norms, o_proj, and an MLP or experts."""
    experts = family.experts
    if experts is None or type(mlp) is not getattr(own, experts.cls):
        cls = None if family.mlp is None else getattr(own, family.mlp)
        return specs_of({**modules, **_mlp_layers(mlp, cls)}, _structure)
    check_names(mlp, experts)
    _checked(mlp[experts.layers], switch_layers.SwitchGLU)
    shared = None if experts.shared is None else getattr(own, experts.shared)
    router = None if experts.router_cls is None else getattr(own, experts.router_cls)

    def structure(module: nn.Module) -> Structure:
        if type(module) is shared:
            return SharedExpert, _mlp_layers(module, shared)
        return _structure(module, shared, router)

    specs, slots = specs_of({**modules, "experts": mlp}, structure)
    *others, (name, spec) = specs
    cls = routed(type(mlp), experts)
    return (*others, (name, replace(spec, cls=cls))), slots


def _structure(module: nn.Module, *also: type[nn.Module] | None) -> Structure:
    """Returns the class and the children that a module has in a graph."""
    children = children_of(module)
    for child in children.values():
        _checked(child, *EXPERT_PARTS, *also)
    cls = type(module)
    return GatedExperts if cls is switch_layers.SwitchGLU else cls, children


def _attention_layers(
    attention: nn.Module, heads: int, kv_heads: int
) -> tuple[Shape, dict[str, nn.Module]]:
    """Returns q, k and v as `_linears` does. Some families have them as one layer."""
    if "qkv_proj" not in attention:
        return _linears(attention, ("q_proj", "k_proj", "v_proj"))
    sizes = (attention.head_dim * count for count in (heads, kv_heads, kv_heads))
    return tuple(sizes), {"joined": _checked(attention["qkv_proj"], MarlinLinear)}


def _mlp_layers(mlp: nn.Module, cls: type[nn.Module] | None) -> dict[str, nn.Module]:
    """Returns the layers of an MLP, with gate and up joined or separate."""
    if cls is None:
        raise NotTraceableError(f"it has a {type(mlp).__name__}")
    _checked(mlp, cls)
    if "gate_up_proj" in mlp:
        gate_and_up = {"joined": _checked(mlp["gate_up_proj"], MarlinLinear)}
    else:
        gate_and_up = _linears(mlp, ("gate_proj", "up_proj"))[1]
    return {**gate_and_up, "down_proj": _checked(mlp["down_proj"], *LINEARS)}


def _linears(
    parent: nn.Module, names: tuple[str, ...]
) -> tuple[Shape, dict[str, nn.Module]]:
    """Returns layers with the same input."""
    layers: list[Any] = [parent[name] for name in names]
    if any(type(layer) is MarlinPart for layer in layers):
        for layer in layers:
            _checked(layer, MarlinPart)  # an adapter may contain one
        shared = layers[0].shared
        parts = [(layer.shared, layer.index) for layer in layers]
        if parts != [(shared, index) for index in range(len(shared.sizes))]:
            raise NotTraceableError("only some of its joined layers are left")
        return shared.sizes, {"joined": _checked(shared.layer, MarlinLinear)}
    return (), {
        name: _checked(layer, *LINEARS)
        for name, layer in zip(names, layers, strict=True)
    }


def _checked(module: nn.Module, *classes: type | None) -> nn.Module:
    if type(module) not in classes:
        raise NotTraceableError(f"it has a {type(module).__name__}")
    return module
