"""What a decoder block of mlx-lm is made of, and whether its graphs stand for it.

A block whose modules are all what its own code makes has a kind, which it shares with
those of other layers. Every call compares it with a snapshot.
"""

import sys
from dataclasses import dataclass, replace
from operator import getitem
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils, switch_layers
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_marlin.integrations.mlx_lm.tracing_code import report_untraced
from mlx_marlin.integrations.mlx_lm.warn_once import warn_once
from mlx_marlin.integrations.tracing.fusion import (
    Arrays,
    Kind,
    ModuleSpec,
    Molds,
    Shape,
)
from mlx_marlin.integrations.tracing.gated_experts import GatedExperts
from mlx_marlin.integrations.tracing.methods import are_original
from mlx_marlin.integrations.tracing.model_families import (
    Family,
    Merge,
    Multiplied,
    family_of,
)
from mlx_marlin.integrations.tracing.routed_experts import SharedExpert, routed
from mlx_marlin.integrations.tracing.snapshot import (
    STATE,
    Snapshot,
    children_of,
    take_snapshot,
)
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.products import dispatch

LINEARS = (MarlinLinear, nn.QuantizedLinear, nn.Linear)
ROPES = (
    nn.RoPE,
    rope_utils.Llama3RoPE,
    rope_utils.ProportionalRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
)
"""Those that take an offset that is an array."""
OF_EXPERTS = (
    *LINEARS,
    MarlinSwitchLinear,
    switch_layers.QuantizedSwitchLinear,
    switch_layers.SwitchLinear,
    switch_layers.SwitchGLU,
    switch_layers.SwiGLU,
    SwigluOAI,
)
"""What a family's experts are made of, beside a shared expert."""
TRACED: dict[type[nn.Module], type[nn.Module]] = {switch_layers.SwitchGLU: GatedExperts}
"""Classes that graphs have in the place of others."""
MOST_KINDS = 1024
"""Kinds of blocks in a process. They are kept for good, with their graphs, and each
setting that changes makes another."""
TOO_MANY = (
    f"decoder blocks with new settings are not traced, because {MOST_KINDS} kinds of "
    f"blocks have been: call optimize(model, trace=False) if settings keep changing"
)
SCALARS = (bool, float, int, str, type(None))

Slots = tuple[tuple[Any, ...], tuple[str, ...]]
"""Modules, and the names of arrays in them."""


class UnknownError(Exception):
    """A block is not what its own code makes."""


@dataclass(slots=True)
class Contents:
    """What a block was made of when it was looked at.

    Attributes:
        seen: What each call compares the block with.
        kind: What it shares graphs with; None if its own code must run.
        before: Where the first graph's arrays are: modules, and names in them.
        after: Where the second graph's arrays are.
        windowed: Whether its own mask may hide tokens that are far behind.
        scale: The factor of q times k.
    """

    seen: Snapshot
    kind: Kind | None
    before: Slots = ((), ())
    after: Slots = ((), ())
    windowed: bool = False
    scale: float = 1.0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the block looks for itself

    def arrays(self) -> Arrays:
        """Returns the arrays of both graphs."""
        return [*map(getitem, *self.before)], [*map(getitem, *self.after)]


def look(block: nn.Module) -> Contents:
    """Returns what a block is made of now."""
    cls: Any = type(block).__bases__[1]
    own = sys.modules[cls.__module__]
    family = family_of(own)
    seen = take_snapshot(block, cls, "_contents")
    if not are_original(seen.lookups):
        return Contents(seen, None)
    try:
        kind, before, after = _kind(block, family, own)
        windowed = family.windowed(block)
        scale = getattr(block["self_attn"], family.scale)
    except (UnknownError, KeyError):
        return Contents(seen, None)
    except AttributeError as error:  # its own code has other names now
        report_untraced(str(error), f"decoder blocks of {own.__name__}")
        return Contents(seen, None)
    if kind not in _kinds and len(_kinds) >= MOST_KINDS:
        warn_once("too many kinds", TOO_MANY)
        return Contents(seen, None)
    kind = _kinds.setdefault(kind, kind)
    return Contents(seen, kind, before, after, windowed, scale)


_kinds: dict[Kind, Kind] = {}


def _forget() -> None:
    for kind in _kinds:
        kind.graphs.clear()


dispatch.when_forgetting(_forget)


def _kind(
    block: nn.Module, family: Family, own: ModuleType
) -> tuple[Kind, Slots, Slots]:
    """Returns a block's kind, and where the arrays of both graphs are.

    Raises:
        UnknownError: If something in it is not what the block's own code makes.
        KeyError: If something is missing.
    """
    attention = block["self_attn"]
    _as(attention, getattr(own, family.attention))
    if own.scaled_dot_product_attention is not scaled_dot_product_attention:
        raise UnknownError  # replaced when this code was imported, and not any more
    heads, kv_heads = (getattr(attention, name) for name in family.heads)
    qkv, q_k_v = _of_attention(attention, heads, kv_heads)
    before, after = _norms(block, attention, family, own)
    rope = _as(attention["rope"], *ROPES, *_no_ropes())
    molds, slots = _molded({**before, **q_k_v, "rope": rope})
    after["o_proj"] = _as(attention["o_proj"], *LINEARS)
    of_after, after_slots = _after(after, block[family.place], family, own)
    kind = Kind(
        heads,
        kv_heads,
        before=molds,
        after=of_after,
        qkv=qkv,
        add=_add(block, family, own),
        gate=family.gate,
    )
    return kind, slots, after_slots


def _norms(
    block: nn.Module, attention: nn.Module, family: Family, own: ModuleType
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Returns the norms of both graphs, by the names that their code has for them."""
    cls = nn.RMSNorm if family.norm is None else getattr(own, family.norm)
    first, second = (
        _as(block[name], cls) if name else nn.Identity() for name in family.norms
    )
    before, after = {"norm": first}, {"norm": second}
    for name in ("q_norm", "k_norm"):
        if name in attention:
            before[name] = _as(attention[name], cls)
    for name, closing in zip(("o_norm", "down_norm"), family.closing, strict=True):
        if closing:
            after[name] = _as(block[closing], cls)
    return before, after


def _add(block: nn.Module, family: Family, own: ModuleType) -> Merge | None:
    """Returns how a block's results are added to the residual."""
    add = None if family.add is None else family.add(block, own)
    if isinstance(add, Multiplied) and type(add.factor) not in SCALARS:
        raise UnknownError  # an array may change, or be learned
    return add


def _after(
    modules: dict[str, nn.Module], mlp: nn.Module, family: Family, own: ModuleType
) -> tuple[Molds, Slots]:
    """Returns the second graph's: some modules and an MLP, or the experts instead."""
    experts = family.experts
    if experts is None or type(mlp) is not getattr(own, experts.cls):
        cls = None if family.mlp is None else getattr(own, family.mlp)
        return _molded({**modules, **_network(mlp, cls)})
    shared = None if experts.shared is None else getattr(own, experts.shared)
    molds, slots = _molded({**modules, "experts": mlp}, shared)
    *others, (name, mold) = molds
    cls = routed(type(mlp), experts)
    return (*others, (name, replace(mold, cls=cls))), slots


def _no_ropes() -> tuple[type[nn.Module], ...]:
    """Returns what SmolLM3's layers without a rope have, if somebody imported it."""
    smollm3: Any = sys.modules.get("mlx_lm.models.smollm3")
    return () if smollm3 is None else (smollm3.NoPE,)


def _of_attention(
    attention: nn.Module, heads: int, kv_heads: int
) -> tuple[Shape, dict[str, nn.Module]]:
    """Returns q, k and v as `_linears` does; some families of mlx-lm join them."""
    if "qkv_proj" not in attention:
        return _linears(attention, ("q_proj", "k_proj", "v_proj"))
    sizes = (attention.head_dim * each for each in (heads, kv_heads, kv_heads))
    return tuple(sizes), {"joined": _as(attention["qkv_proj"], MarlinLinear)}


def _network(mlp: nn.Module, cls: type[nn.Module] | None) -> dict[str, nn.Module]:
    """Returns the layers of an MLP, gate and up joined or not."""
    if cls is None:
        raise UnknownError
    _as(mlp, cls)
    if "gate_up_proj" in mlp:
        gate_and_up = {"joined": _as(mlp["gate_up_proj"], MarlinLinear)}
    else:
        gate_and_up = _linears(mlp, ("gate_proj", "up_proj"))[1]
    return {**gate_and_up, "down_proj": _as(mlp["down_proj"], *LINEARS)}


def _linears(
    parent: nn.Module, names: tuple[str, ...]
) -> tuple[Shape, dict[str, nn.Module]]:
    """Returns layers with the same x: the features of joined ones, and the modules."""
    layers: list[Any] = [parent[name] for name in names]
    if any(type(layer) is MarlinPart for layer in layers):
        for layer in layers:
            _as(layer, MarlinPart)  # not in an adapter, for one
        shared = layers[0].shared
        parts = [(layer.shared, layer.index) for layer in layers]
        if parts != [(shared, index) for index in range(len(shared.sizes))]:
            raise UnknownError
        return shared.sizes, {"joined": _as(shared.layer, MarlinLinear)}
    return (), {
        name: _as(layer, *LINEARS) for name, layer in zip(names, layers, strict=True)
    }


def _as(module: nn.Module, *types: type) -> nn.Module:
    if type(module) not in types:
        raise UnknownError
    return module


def _molded(
    modules: dict[str, nn.Module], shared: type[nn.Module] | None = None
) -> tuple[Molds, Slots]:
    """Returns the specs of modules and where their arrays are, for `filled`.

    Args:
        modules: By the names that a region's code has for them.
        shared: The class of an expert of all rows that may be in one.
    """
    molds: list[tuple[str, ModuleSpec]] = []
    owners: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    for name, module in modules.items():
        cls, children = TRACED.get(type(module), type(module)), children_of(module)
        own = tuple(key for key, each in module.items() if isinstance(each, mx.array))
        settings = _settings(module, len(own) + len(children))
        if type(module) is shared:
            cls, children = SharedExpert, _network(module, shared)
        if any(type(child) not in (*OF_EXPERTS, shared) for child in children.values()):
            raise UnknownError
        inner, (inner_owners, inner_names) = _molded(children, shared)
        molds.append((name, ModuleSpec(cls, settings, own, inner)))
        owners += (*(module for _ in own), *inner_owners)
        names += (*own, *inner_names)
    return tuple(molds), (owners, names)


def _settings(module: nn.Module, entries: int) -> tuple[tuple[str, object], ...]:
    """Returns a module's attributes, if it has but so many entries beside them."""
    settings = {key: vars(module)[key] for key in vars(module).keys() - STATE}
    if any(type(each) not in SCALARS for each in settings.values()):
        raise UnknownError
    if len(module) != entries:  # a list of something
        raise UnknownError
    return tuple(sorted(settings.items()))
