"""What a decoder block computes before its cache and after its attention.

Both are functions of arrays alone, the weights among them, so that layers of the same
kind share what is traced.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from mlx_marlin.backends import selection
from mlx_marlin.integrations.tracing.fused_rope import rotated_heads
from mlx_marlin.integrations.tracing.model_families import Merge
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.products.autodiff import without_vjp

Shape = tuple[int, ...]
Graph = Callable[..., Any]
"""From arrays of the call, then those of the modules, to the results."""
Graphs = tuple[Graph, Graph]
Arrays = tuple[list[mx.array], list[mx.array]]
"""Those of the modules before the cache, and of those after attention."""


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """A module without its arrays: what a traced graph knows of it.

    Attributes:
        cls: Its class.
        settings: Its attributes, but for arrays and modules.
        names: Of its arrays.
        children: Modules in it, by their names.
    """

    cls: type[nn.Module]
    settings: tuple[tuple[str, object], ...]
    names: tuple[str, ...]
    children: "Molds" = ()

    def filled(self, arrays: Iterator[mx.array]) -> Any:
        """Returns a module of this kind with the next of some arrays."""
        module: Any = self.cls.__new__(self.cls)
        nn.Module.__init__(module)
        vars(module).update(self.settings)
        for name in self.names:
            module[name] = next(arrays)
        for name, child in self.children:
            module[name] = child.filled(arrays)
        return module


Molds = tuple[tuple[str, ModuleSpec], ...]
"""A region's modules, by the names that its code has for them."""


@dataclass(frozen=True)
class Kind:
    """What layers have in common that share their graphs.

    Attributes:
        heads: Heads of q.
        kv_heads: Heads of k and v.
        before: Modules before the cache.
        after: Modules after attention.
        qkv: Features of q, k and v that are joined; empty if they are not.
        add: How what was computed is added to the residual; None if as it is.
        gate: What is made of gate and up; None if swiglu.
        graphs: Both graphs by the shape of x.
        runs: How often Python has run a region: once for each trace, and in calls that
            MLX does not replay, as it transforms them or does not compile.
    """

    heads: int
    kv_heads: int
    before: Molds
    after: Molds
    qkv: Shape
    add: Merge | None = None
    gate: Merge | None = None
    graphs: dict[object, Graphs] = field(
        default_factory=dict, compare=False, repr=False
    )
    runs: Counter[str] = field(default_factory=Counter, compare=False, repr=False)

    def trace(self, key: object, call: tuple[mx.array, ...], arrays: Arrays) -> Graphs:
        """Makes both graphs for such arrays, and remembers them.

        A function that is traced for all shapes would be slow: MLX searches the traces
        of a function one by one.

        Args:
            key: What they are found by.
            call: x, the offset and the places of a call.
            arrays: Those of the modules.
        """
        before: Graph = partial(_before, self)
        after: Graph = partial(_after, self)
        if selection.backend() != "emulator":  # which computes at once
            before, after = mx.compile(before), mx.compile(after)
            with without_vjp():
                attended, *_ = before(*_like(*call, *arrays[0]))
                after(*_like(call[0], attended, *arrays[1]))
        self.graphs[key] = before, after
        return before, after


def _like(*arrays: mx.array) -> list[mx.array]:
    return [mx.zeros(each.shape, each.dtype) for each in arrays]


def _filled(molds: Molds, arrays: Iterable[mx.array]) -> dict[str, Any]:
    each = iter(arrays)
    return {name: mold.filled(each) for name, mold in molds}


def _before(
    kind: Kind, x: mx.array, offset: mx.array, places: mx.array, *arrays: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Returns q, k and v [streams, heads, tokens, features] of x.

    Offset and places say the same, in arrays for MLX's rope and for our kernels.
    """
    kind.runs["before"] += 1
    modules = _filled(kind.before, arrays)
    norm, rope = modules["norm"], modules["rope"]
    norms = modules.get("q_norm"), modules.get("k_norm")
    heads, last = kind.heads, kind.heads + kind.kv_heads
    if kind.qkv:
        features, each = kind.qkv[0] // heads, offset.size > 1
        rotated = rotated_heads(modules, kind.qkv, features, x, places, each)
        if rotated is not None:
            return rotated
    if kind.qkv and _is_one(x, modules["joined"]):
        y = modules["joined"].normed(x, norm)
        joined = y.reshape(1, last + kind.kv_heads, 1, -1)
        if norms == (None, None):  # q and k stay one array
            q_and_k, v = mx.split(joined, [last], axis=1)
            q, k = mx.split(rope(q_and_k, offset=offset), [heads], axis=1)
            return q, k, v
        q, k, v = mx.split(joined, [heads, last], axis=1)
    elif kind.qkv:
        q, k, v = modules["joined"].normed(x, norm, parts=kind.qkv)
    else:
        y = norm(x)
        q, k, v = (modules[name](y) for name in ("q_proj", "k_proj", "v_proj"))
    streams, tokens, _ = x.shape
    q = rope(_by_heads(q, (streams, tokens, heads), norms[0]), offset=offset)
    k = rope(_by_heads(k, (streams, tokens, kind.kv_heads), norms[1]), offset=offset)
    return q, k, _by_heads(v, (streams, tokens, kind.kv_heads))


def _by_heads(y: mx.array, shape: Shape, norm: Any = None) -> mx.array:
    """Returns y as [streams, heads, tokens, features], after its norm if any.

    Args:
        y: Of all streams, tokens and heads.
        shape: Streams, tokens and heads.
        norm: The norm of a head's features, or of all heads' together.
    """
    streams, tokens, heads = shape
    first = (streams, tokens, heads) if tokens > 1 else (streams, heads, 1)
    if norm is not None and norm["weight"].size == y.size // (streams * tokens):
        y, norm = norm(y.reshape(streams, tokens, -1)), None
    y = y.reshape(*first, -1)
    y = y if norm is None else norm(y)
    return y.transpose(0, 2, 1, 3) if tokens > 1 else y


def _after(kind: Kind, x: mx.array, attended: mx.array, *arrays: mx.array) -> mx.array:
    """Returns the block's result for x and what its attention is, shaped as q."""
    modules = _filled(kind.after, arrays)
    if attended.shape[2] > 1:
        attended = attended.transpose(0, 2, 1, 3)
    attended = attended.reshape(*x.shape[:-1], -1)
    h = _added(modules, "o", attended, x, kind.add)
    if "experts" in modules:
        y: mx.array = modules["experts"].added(modules["norm"](h), h)
        return y
    return _added(modules, "down", _gated(modules, h, kind.gate), h, kind.add)


def _gated(modules: dict[str, Any], x: mx.array, gate: Merge | None) -> mx.array:
    """Returns what the norm and the layers gate and up make of x, joined or not."""
    norm = modules["norm"]
    if "joined" not in modules:
        x = norm(x)
        apart = modules["gate_proj"](x), modules["up_proj"](x)
        return swiglu(*apart) if gate is None else gate(*apart)
    layer: MarlinLinear = modules["joined"]
    if gate is not None:
        return gate(*layer.halves(norm(x)))
    y: mx.array = layer.normed(x, norm, gated=True)
    return y


def _is_one(x: mx.array, layer: MarlinLinear) -> bool:
    """Returns whether a product's parts are contiguous as they are.

    An invariant product is the same call for one row as for many.
    """
    return x.size == x.shape[-1] and not layer.invariant


def _added(
    modules: dict[str, Any],
    name: str,
    x: mx.array,
    residual: mx.array,
    add: Merge | None,
) -> mx.array:
    """Adds a product, which may be normalized before, to a residual.

    Inside the product, if it is added as it is and not invariant: then calls with many
    rows, which are not traced, round twice.

    Args:
        modules: The layer is that of the name and "_proj", its norm's ends in "_norm".
        name: "o" or "down".
        x: What the layer multiplies.
        residual: What it is added to.
        add: How; None if as it is.
    """
    layer, norm = modules[f"{name}_proj"], modules.get(f"{name}_norm")
    as_it_is = norm is None and add is None
    if as_it_is and type(layer) is MarlinLinear and not layer.invariant:
        return layer.added(x, residual)
    y: mx.array = layer(x)
    y = y if norm is None else norm(y)
    return residual + y if add is None else add(residual, y)
