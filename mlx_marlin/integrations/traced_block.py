"""Decoder blocks of mlx-lm as two traced graphs each, around their attention.

For few rows a block costs the host more than the device. So all before the cache is
one traced graph, and all after attention is another. Weights are inputs of these:
layers of the same kind share them, and a weight that changes is seen.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from operator import getitem
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from mlx_marlin import serving
from mlx_marlin.integrations.block_regions import Arrays, Kind, Mold, Molds, Shape
from mlx_marlin.joined import MarlinPart
from mlx_marlin.nn import MarlinLinear

MOST_ROWS = 128
"""Rows of a call that is traced, of all streams together."""
MOST_TOKENS = 8
"""Tokens of a stream in such a call: each number of them has graphs of its own."""

FAMILIES = ("llama", "mimo", "qwen2", "qwen3", "seed_oss")
"""Modules of `mlx_lm.models` whose `Attention`, `MLP` and `TransformerBlock` compute as
llama's do; qwen3's attention has norms of q and k."""
LINEARS = (MarlinLinear, nn.QuantizedLinear, nn.Linear)
ROPES = (
    nn.RoPE,
    rope_utils.Llama3RoPE,
    rope_utils.ProportionalRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
)
"""Those that take an offset that is an array."""
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
        counts: Of the modules that have arrays, how many: one more may be a bias.
        kind: What it shares graphs with; None if its own code must run.
        before: Where the first graph's arrays are: modules, and names in them.
        after: Where the second graph's arrays are.
    """

    modules: tuple[Any, ...]
    counts: list[tuple[nn.Module, int]]
    kind: Kind | None
    before: Slots = ((), ())
    after: Slots = ((), ())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the block looks for itself

    def arrays(self) -> Arrays:
        """Returns the arrays of both graphs."""
        return [*map(getitem, *self.before)], [*map(getitem, *self.after)]


class TracedBlock(nn.Module):
    """A decoder block whose own code runs only where its graphs do not fit.

    A class for each of mlx-lm's derives from this and that one.
    """

    _contents: Contents | None = None

    def __call__(
        self, x: mx.array, mask: Any = None, cache: Any | None = None
    ) -> mx.array:
        """Returns what the block makes of x [streams, tokens, features]."""
        contents = self._contents
        if contents is None or not _is_as_it_was(self, contents):
            contents = self._contents = look(self)
        kind = contents.kind
        if kind is None or cache is None:
            return self._own(x, mask, cache)
        key: object = x.shape
        offset = cache.offset
        if type(offset) is int:
            offset = _array_of(offset)
        elif type(offset) is mx.array:
            key = x.shape, offset.shape
        else:
            return self._own(x, mask, cache)
        graphs = kind.graphs.get(key)
        if graphs is None:
            if not _few(x.shape):
                return self._own(x, mask, cache)
            graphs = kind.trace(key, x, offset, contents.arrays())
        before, after = graphs
        queries, keys, values = before(x, offset, *map(getitem, *contents.before))
        keys, values = _updated(cache, keys, values)
        attended = scaled_dot_product_attention(
            queries,
            keys,
            values,
            cache=cache,
            scale=self["self_attn"].scale,
            mask=mask,
        )
        y: mx.array = after(x, attended, *map(getitem, *contents.after))
        return y

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Nobody finds the class by its name: it is made again from mlx-lm's.
        reduced: Any = super().__reduce_ex__(protocol)
        return _blank, (type(self).__bases__[1],), *reduced[2:]

    def _own(self, x: mx.array, mask: Any, cache: Any | None) -> mx.array:
        y: mx.array = super().__call__(x, mask, cache)
        return y


def trace_blocks(model: nn.Module) -> None:
    """Lets the blocks of a model that we know run as traced graphs, in place.

    What was known of blocks that do so already is forgotten, such as their settings.
    """
    for block in model.modules():
        if isinstance(block, TracedBlock):
            vars(block).pop("_contents", None)
        cls: Any = type(block)
        if cls in _known():
            block.__class__ = _traced(cls)


def untrace_blocks(model: nn.Module) -> None:
    """Gives the blocks that `trace_blocks` changed their own class back."""
    for block in model.modules():
        if isinstance(block, TracedBlock):
            vars(block).pop("_contents", None)
            block.__class__ = type(block).__bases__[1]


def look(block: nn.Module) -> Contents:
    """Returns what a block is made of now."""
    modules = _modules(block)
    try:
        kind, before, after = _kind(block)
    except (UnknownError, KeyError):
        return Contents(modules, [], None)
    owners = {id(each): each for each in (*before[0], *after[0])}
    counts = [(each, len(each)) for each in owners.values()]
    return Contents(modules, counts, _kinds.setdefault(kind, kind), before, after)


def _modules(block: nn.Module) -> tuple[Any, ...]:
    attention, mlp = block["self_attn"], block["mlp"]
    return (
        attention,
        mlp,
        *(block.get(name) for name in ("input_layernorm", "post_attention_layernorm")),
        *(attention.get(name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(attention.get(name) for name in ("rope", "q_norm", "k_norm")),
        *(mlp.get(name) for name in ("gate_proj", "up_proj", "down_proj")),
    )


def _is_as_it_was(block: nn.Module, contents: Contents) -> bool:
    for module, count in contents.counts:
        if len(module) != count:
            return False
    return _is_made_of(contents.modules, block)


def _is_made_of(modules: tuple[Any, ...], block: nn.Module) -> bool:
    """Returns whether `_modules` would be the same: every call asks."""
    attention, mlp, norm, after, q, k, v, o, rope, q_norm, k_norm, *of_mlp = modules
    gate, up, down = of_mlp
    return (
        block["self_attn"] is attention
        and block["mlp"] is mlp
        and block["input_layernorm"] is norm
        and block["post_attention_layernorm"] is after
        and attention["q_proj"] is q
        and attention["k_proj"] is k
        and attention["v_proj"] is v
        and attention["o_proj"] is o
        and attention["rope"] is rope
        and (q_norm is None or attention["q_norm"] is q_norm)
        and (k_norm is None or attention["k_norm"] is k_norm)
        and mlp["gate_proj"] is gate
        and mlp["up_proj"] is up
        and mlp["down_proj"] is down
    )


_kinds: dict[Kind, Kind] = {}
_last_offset = (0, mx.array(0))


def _forget() -> None:
    for kind in _kinds:
        kind.graphs.clear()


serving.when_forgetting(_forget)


def _array_of(offset: int) -> mx.array:
    """Returns the array of an offset: one for all layers of a token."""
    global _last_offset
    known, array = _last_offset
    if known != offset:
        array = mx.array(offset)
        _last_offset = offset, array
    return array


def _few(shape: Shape) -> bool:
    if len(shape) != 3 or not 0 < shape[1] <= MOST_TOKENS:
        return False
    return 0 < shape[0] * shape[1] <= MOST_ROWS


def _updated(cache: Any, keys: mx.array, values: mx.array) -> Any:
    """Does what `cache.update_and_fetch` does.

    Here for a plain cache that has room left: MLX takes longer to read an index
    `[..., start:end, :]`, as mlx-lm writes it, than `[:, :, start:end]`.
    """
    is_plain: bool = type(cache) is KVCache
    if not is_plain or cache.keys is None:
        return cache.update_and_fetch(keys, values)
    start = cache.offset
    end = start + keys.shape[2]
    if end >= cache.keys.shape[2]:
        return cache.update_and_fetch(keys, values)
    cache.offset = end
    cache.keys[:, :, start:end] = keys
    cache.values[:, :, start:end] = values
    return cache.keys[:, :, :end], cache.values[:, :, :end]


def _known() -> set[type]:
    """Returns the blocks' classes: a module that is not imported has no blocks."""
    loaded = (sys.modules.get(f"mlx_lm.models.{family}") for family in FAMILIES)
    return {module.TransformerBlock for module in loaded if module is not None}


@cache
def _traced(cls: type[nn.Module]) -> type[TracedBlock]:
    return type(f"Traced{cls.__name__}", (TracedBlock, cls), {})


def _blank(cls: type[nn.Module]) -> TracedBlock:
    """Returns a traced block of one of mlx-lm's classes, with nothing in it."""
    traced = _traced(cls)
    return traced.__new__(traced)


def _kind(block: nn.Module) -> tuple[Kind, Slots, Slots]:
    """Returns a block's kind, and where the arrays of both graphs are.

    Raises:
        UnknownError: If something in it is not what the block's own code makes.
        KeyError: If something is missing.
    """
    attention, mlp = block["self_attn"], block["mlp"]
    own = sys.modules[type(block).__bases__[1].__module__]
    if (type(attention), type(mlp)) != (own.Attention, own.MLP):
        raise UnknownError
    qkv, q_k_v = _linears(attention, ("q_proj", "k_proj", "v_proj"))
    _, gate_and_up = _linears(mlp, ("gate_proj", "up_proj"))
    before = {"norm": _as(block["input_layernorm"], nn.RMSNorm), **q_k_v}
    for name in ("q_norm", "k_norm"):
        if name in attention:
            before[name] = _as(attention[name], nn.RMSNorm)
    before["rope"] = _as(attention["rope"], *ROPES)
    after = {
        "o_proj": _as(attention["o_proj"], *LINEARS),
        "norm": _as(block["post_attention_layernorm"], nn.RMSNorm),
        **gate_and_up,
        "down_proj": _as(mlp["down_proj"], *LINEARS),
    }
    kind = Kind(
        heads=attention.n_heads,
        kv_heads=attention.n_kv_heads,
        before=_molds(before),
        after=_molds(after),
        qkv=qkv,
    )
    return kind, _slots(before.values()), _slots(after.values())


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


def _molds(modules: dict[str, nn.Module]) -> Molds:
    return tuple((name, _mold(module)) for name, module in modules.items())


def _mold(module: nn.Module) -> Mold:
    state = {"_no_grad", "_training"}
    settings = {key: vars(module)[key] for key in vars(module).keys() - state}
    arrays = all(isinstance(each, mx.array) for each in module.values())
    if not arrays or any(type(each) not in SCALARS for each in settings.values()):
        raise UnknownError
    return Mold(type(module), tuple(sorted(settings.items())), tuple(module))


def _slots(modules: Iterable[nn.Module]) -> Slots:
    slots = [(module, name) for module in modules for name in module]
    return tuple(module for module, _ in slots), tuple(name for _, name in slots)
