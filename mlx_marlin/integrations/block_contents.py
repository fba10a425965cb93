"""What a decoder block of mlx-lm is made of, and whether its graphs stand for it.

A block whose modules are all what its own code makes has a kind, which it shares with
those of other layers. Every call asks whether the modules are still the same.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import getitem
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils, switch_layers

from mlx_marlin import serving
from mlx_marlin.integrations.block_regions import Arrays, Kind, Mold, Molds, Shape
from mlx_marlin.integrations.known_blocks import Family, family_of
from mlx_marlin.integrations.routed_experts import SharedExpert, routed
from mlx_marlin.integrations.switch_layers import GatedExperts, MarlinSwitchLinear
from mlx_marlin.joined import MarlinPart
from mlx_marlin.nn import MarlinLinear

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
)
"""What a family's experts are made of, beside a shared expert."""
TRACED: dict[type[nn.Module], type[nn.Module]] = {switch_layers.SwitchGLU: GatedExperts}
"""Classes that graphs have in the place of others."""
SCALARS = (bool, float, int, str, type(None))

Slots = tuple[tuple[Any, ...], tuple[str, ...]]
"""Modules, and the names of arrays in them."""


class UnknownError(Exception):
    """A block is not what its own code makes."""


@dataclass(slots=True)
class Contents:
    """What a block was made of when it was looked at.

    Attributes:
        modules: The modules that its code calls.
        place: What it calls its MLP, or its experts.
        counts: Of the modules that have arrays, how many: one more may be a bias.
        kind: What it shares graphs with; None if its own code must run.
        before: Where the first graph's arrays are: modules, and names in them.
        after: Where the second graph's arrays are.
        windowed: Whether its own mask may hide tokens that are far behind.
        nested: Modules in the experts: where each is, its name, and itself.
        settings: Attributes of the experts, such as how many a row chooses.
    """

    modules: tuple[Any, ...]
    place: str
    counts: list[tuple[nn.Module, int]]
    kind: Kind | None
    before: Slots = ((), ())
    after: Slots = ((), ())
    windowed: bool = False
    nested: tuple[tuple[nn.Module, str, nn.Module], ...] = ()
    settings: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the block looks for itself

    def arrays(self) -> Arrays:
        """Returns the arrays of both graphs."""
        return [*map(getitem, *self.before)], [*map(getitem, *self.after)]


def look(block: nn.Module) -> Contents:
    """Returns what a block is made of now."""
    own = sys.modules[type(block).__bases__[1].__module__]
    family = family_of(own)
    place = family.place
    modules, mlp = _modules(block, place), block[place]
    # An MLP's own layers are among the modules.
    nested = tuple(_nested(mlp)) if "gate_proj" not in mlp else ()
    try:
        kind, before, after = _kind(block, family, own)
    except (UnknownError, KeyError):
        return Contents(modules, place, [], None, nested=nested)
    owners = {id(each): each for each in (*before[0], *after[0])}
    counts = [(each, len(each)) for each in owners.values()]
    kind = _kinds.setdefault(kind, kind)
    windowed = bool(getattr(block, "use_sliding", False))
    settings = dict(vars(mlp)) if nested else None
    found = modules, place, counts, kind, before, after
    return Contents(*found, windowed, nested, settings)


def is_as_it_was(block: nn.Module, contents: Contents) -> bool:
    """Returns whether a block is still made of what was found in it."""
    for module, count in contents.counts:
        if len(module) != count:
            return False
    for module, name, child in contents.nested:
        if module.get(name) is not child:
            return False
    place, settings = contents.place, contents.settings
    if settings is not None and vars(block[place]) != settings:
        return False
    return _is_made_of(contents.modules, block, place)


_kinds: dict[Kind, Kind] = {}


def _forget() -> None:
    for kind in _kinds:
        kind.graphs.clear()


serving.when_forgetting(_forget)


def _modules(block: nn.Module, place: str) -> tuple[Any, ...]:
    attention, mlp = block["self_attn"], block[place]
    return (
        attention,
        mlp,
        *(block.get(name) for name in ("input_layernorm", "post_attention_layernorm")),
        *(attention.get(name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(attention.get(name) for name in ("rope", "q_norm", "k_norm")),
        *(mlp.get(name) for name in ("gate_proj", "up_proj", "down_proj")),
    )


def _is_made_of(modules: tuple[Any, ...], block: nn.Module, place: str) -> bool:
    """Returns whether `_modules` would be the same: every call asks."""
    attention, mlp, norm, after, q, k, v, o, rope, q_norm, k_norm, *of_mlp = modules
    gate, up, down = of_mlp
    return (
        block["self_attn"] is attention
        and block[place] is mlp
        and block["input_layernorm"] is norm
        and block["post_attention_layernorm"] is after
        and attention["q_proj"] is q
        and attention["k_proj"] is k
        and attention["v_proj"] is v
        and attention["o_proj"] is o
        and attention["rope"] is rope
        and (q_norm is None or attention["q_norm"] is q_norm)
        and (k_norm is None or attention["k_norm"] is k_norm)
        and (gate is None or mlp["gate_proj"] is gate)
        and (up is None or mlp["up_proj"] is up)
        and (down is None or mlp["down_proj"] is down)
    )


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
    qkv, q_k_v = _linears(attention, ("q_proj", "k_proj", "v_proj"))
    before = {"norm": _as(block["input_layernorm"], nn.RMSNorm), **q_k_v}
    for name in ("q_norm", "k_norm"):
        if name in attention:
            before[name] = _as(attention[name], nn.RMSNorm)
    before["rope"] = _as(attention["rope"], *ROPES)
    after = {
        "o_proj": _as(attention["o_proj"], *LINEARS),
        "norm": _as(block["post_attention_layernorm"], nn.RMSNorm),
    }
    molds, slots = _molded(before)
    heads, kv_heads = (getattr(attention, name) for name in family.heads)
    of_after, after_slots = _after(after, block[family.place], family, own)
    kind = Kind(heads, kv_heads, before=molds, after=of_after, qkv=qkv)
    return kind, slots, after_slots


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


def _network(mlp: nn.Module, cls: type[nn.Module] | None) -> dict[str, nn.Module]:
    """Returns the layers of an MLP, gate and up joined or not."""
    if cls is None:
        raise UnknownError
    _as(mlp, cls)
    _, gate_and_up = _linears(mlp, ("gate_proj", "up_proj"))
    return {**gate_and_up, "down_proj": _as(mlp["down_proj"], *LINEARS)}


def _linears(
    parent: nn.Module, names: tuple[str, ...]
) -> tuple[Shape, dict[str, nn.Module]]:
    """Returns layers with the same x: the features of joined ones, and the modules."""
    layers: list[Any] = [parent[name] for name in names]
    if any(type(layer) is MarlinPart for layer in layers):
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
    """Returns the molds of modules, and where their arrays are, as `Mold.filled` asks.

    Args:
        modules: By the names that a region's code has for them.
        shared: The class of an expert of all rows that may be in one.
    """
    molds: list[tuple[str, Mold]] = []
    owners: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    for name, module in modules.items():
        state = {"_no_grad", "_training"}
        settings = {key: vars(module)[key] for key in vars(module).keys() - state}
        cls, children = TRACED.get(type(module), type(module)), _children(module)
        if type(module) is shared:
            cls, settings, children = SharedExpert, {}, _network(module, shared)
        if any(type(each) not in SCALARS for each in settings.values()):
            raise UnknownError
        known = (*OF_EXPERTS, shared)
        if any(type(child) not in known for child in children.values()):
            raise UnknownError
        own = tuple(key for key, each in module.items() if isinstance(each, mx.array))
        inner, (inner_owners, inner_names) = _molded(children, shared)
        molds.append((name, Mold(cls, tuple(sorted(settings.items())), own, inner)))
        owners += (*(module for _ in own), *inner_owners)
        names += (*own, *inner_names)
    return tuple(molds), (owners, names)


def _children(module: nn.Module) -> dict[str, Any]:
    """Returns all in a module that is no array."""
    return {
        name: each for name, each in module.items() if not isinstance(each, mx.array)
    }


def _nested(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yields the modules in one, at any depth: where each is, its name, and itself."""
    for name, child in _children(module).items():
        if isinstance(child, nn.Module):
            yield module, name, child
            yield from _nested(child)
