"""Decides which operations of a decoder block are fused into its products.

A traced block is two graphs. The graph before attention computes the norm, q, k and v,
and rope; the graph after it computes the output projection, the MLP and both residual
sums. These products take over their neighbours:

- q, k and v: the RMSNorm before them, the norms of their heads, and rope (`fused_rope`)
- gate and up: the RMSNorm before them, and the gating
- the output and down projections: the residual sum
- the sum after attention: the norm after it, as a kernel of its own (`add_norm`)
- experts: routing, gating and the weighted sum (`experts`)

A layer's method (`normed`, `gated`, `added`, `rotated` of `layers.fused_products`) runs
one kernel if the back end has one, and separate operations otherwise.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from mlx_marlin.backends import selection
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm.tracing.attention import heads_of, rotated_heads
from mlx_marlin.lm.tracing.block_spec import BlockSpec, Graph, Graphs, Shape, build
from mlx_marlin.planning.block_plans import HeadsPlan
from mlx_marlin.products import blocks
from mlx_marlin.products.autodiff import without_vjp


def make_graphs(
    spec: BlockSpec,
    key: object,
    call: Sequence[mx.array],
    before_arrays: Sequence[mx.array],
    after_arrays: Sequence[mx.array],
) -> Graphs:
    """Compiles both graphs for the shapes of a call, and stores them in the spec.

    Each key has functions of its own: MLX searches the traces of a compiled function
    one by one, which is slow for a function of many shapes.
    """
    before: Graph = partial(_before, spec)
    after: Graph = partial(_after, spec)
    if selection.backend() != "emulator":  # which is eager
        before, after = mx.compile(before), mx.compile(after)
        with without_vjp():
            attended, _, _, *gate = before(*_like(*call, *before_arrays))
            after(*_like(call[0], attended, *gate, *after_arrays))
    spec.graphs[key] = before, after
    return before, after


def _like(*arrays: mx.array) -> list[mx.array]:
    return [mx.zeros(array.shape, array.dtype) for array in arrays]


def _before(
    spec: BlockSpec,
    x: mx.array,
    offset: mx.array,
    positions: mx.array,
    *arrays: mx.array,
) -> tuple[mx.array, ...]:
    """Returns q, k and v of x, [streams, heads, tokens, features].

    The output gate, if the block has one, follows: [streams, tokens, features].

    `x`: activations [streams, tokens, features].
    """
    spec.runs["before"] += 1
    modules = build(spec.before, arrays)
    if spec.qkv and "rope" in spec.fuse and not spec.output_gate:
        features, per_stream = spec.qkv[0] // spec.heads, offset.size > 1
        rotated = rotated_heads(modules, spec.qkv, features, x, positions, per_stream)
        if rotated is None:
            rotated = _rotated_heads(spec, modules, x, positions)
        if rotated is not None:
            return rotated
    is_row = spec.qkv and not spec.output_gate and _is_one_row(x, modules["joined"])
    return (_heads_of_row if is_row else _heads)(spec, modules, x, offset)


def _rotated_heads(
    spec: BlockSpec, modules: dict[str, Any], x: mx.array, positions: mx.array
) -> tuple[mx.array, mx.array, mx.array] | None:
    """Does what `_before` does with one kernel for norms and rope of q and k.

    Returns None if there is none. An invariant layer has the bits of calls with many
    rows, which are not traced.
    """
    if HeadsPlan not in selection.traits().launches:
        return None
    counts = spec.heads, spec.kv_heads
    found = heads_of(modules, *counts, sum(spec.qkv))
    if found is None or modules["joined"].invariant or positions.ndim > 1:
        return None
    heads, freqs, norms = found
    if spec.qkv != tuple(heads.features * n for n in (*counts, spec.kv_heads)):
        return None
    y = _normed(spec, modules["joined"], x, modules["norm"])
    rotated = blocks.rotated(heads, y, positions, freqs, norms)
    if rotated is None:
        return None
    v = y.reshape(*y.shape[:2], -1, heads.features)[:, :, sum(counts) :]
    return *rotated, v.transpose(0, 2, 1, 3)


def _heads_of_row(
    spec: BlockSpec, modules: dict[str, Any], x: mx.array, offset: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Does what `_before` does for one row, whose q, k and v are one joined product."""
    rope = modules["rope"]
    norms = modules.get("q_norm"), modules.get("k_norm")
    heads, last = spec.heads, spec.heads + spec.kv_heads
    y = _normed(spec, modules["joined"], x, modules["norm"])
    joined = y.reshape(1, last + spec.kv_heads, 1, -1)
    if norms == (None, None):  # one rope for q and k
        q_and_k, v = mx.split(joined, [last], axis=1)
        q, k = mx.split(rope(q_and_k, offset=offset), [heads], axis=1)
        return q, k, v
    q, k, v = mx.split(joined, [heads, last], axis=1)
    return _rotated(spec, modules, (q, k, v), x.shape, offset)


def _heads(
    spec: BlockSpec, modules: dict[str, Any], x: mx.array, offset: mx.array
) -> tuple[mx.array, ...]:
    """Does what `_before` does for any number of rows."""
    q, k, v = _projected(spec, modules, x)
    gate: list[mx.array] = []
    if spec.output_gate:
        by_heads = q.reshape(*x.shape[:2], spec.heads, -1)
        q, *gate = mx.split(by_heads, 2, axis=-1)
    heads = _rotated(spec, modules, (q, k, v), x.shape, offset)
    return *heads, *(values.reshape(*x.shape[:2], -1) for values in gate)


def _projected(
    spec: BlockSpec, modules: dict[str, Any], x: mx.array
) -> Sequence[mx.array]:
    """Returns the results of the layers q, k and v for normalized x."""
    norm = modules["norm"]
    if spec.qkv:
        qkv: Sequence[mx.array] = _normed(spec, modules["joined"], x, norm, spec.qkv)
        return qkv
    y = norm(x)
    return [modules[name](y) for name in ("q_proj", "k_proj", "v_proj")]


def _normed(
    spec: BlockSpec, layer: MarlinLinear, x: mx.array, norm: Any, parts: Shape = ()
) -> Any:
    """Returns the product of a joined layer with normalized x, in parts if there are.

    `x`: activations [..., features].
    """
    if "norm" in spec.fuse:
        return layer.normed(x, norm, parts)
    x = norm(x)
    return layer.parts(x, parts) if parts else layer(x)


def _rotated(
    spec: BlockSpec,
    modules: dict[str, Any],
    qkv: Sequence[mx.array],
    shape: Shape,
    offset: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    """Returns q and k after their norms and rope, and v, by heads."""
    streams, tokens, _ = shape
    rope = modules["rope"]
    q_norm, k_norm = modules.get("q_norm"), modules.get("k_norm")
    q, k, v = qkv
    q = rope(_by_heads(q, (streams, tokens, spec.heads), q_norm), offset=offset)
    k = rope(_by_heads(k, (streams, tokens, spec.kv_heads), k_norm), offset=offset)
    return q, k, _by_heads(v, (streams, tokens, spec.kv_heads))


def _by_heads(y: mx.array, shape: Shape, norm: Any = None) -> mx.array:
    """Returns y as [streams, heads, tokens, features], normalized if there is a
    norm."""
    streams, tokens, heads = shape
    first = (streams, tokens, heads) if tokens > 1 else (streams, heads, 1)
    if norm is not None and norm["weight"].size == y.size // (streams * tokens):
        y, norm = norm(y.reshape(streams, tokens, -1)), None
    y = y.reshape(*first, -1)
    y = y if norm is None else norm(y)
    return y.transpose(0, 2, 1, 3) if tokens > 1 else y


def _after(
    spec: BlockSpec, x: mx.array, attended: mx.array, *arrays: mx.array
) -> mx.array:
    """Returns the block's result.

    `x`: activations [streams, tokens, features].
    `attended`: result of attention, [streams, heads, tokens, features].
    """
    gate, arrays = arrays[: spec.output_gate], arrays[spec.output_gate :]
    modules = build(spec.after, arrays)
    if attended.shape[2] > 1:
        attended = attended.transpose(0, 2, 1, 3)
    attended = attended.reshape(*x.shape[:-1], -1)
    for values in gate:
        attended = attended * mx.sigmoid(values)
    h, normed = _added_and_normed(spec, modules, attended, x)
    if normed is not None:
        modules["norm"] = lambda _: normed
    if "experts" in modules:
        y: mx.array = modules["experts"].added(modules["norm"](h), h, spec.fuse)
        return y
    return _added(spec, modules, "down", _gated(spec, modules, h), h)


def _added_and_normed(
    spec: BlockSpec, modules: dict[str, Any], attended: mx.array, x: mx.array
) -> tuple[mx.array, mx.array | None]:
    """Returns the sum after attention, and its norm if one kernel computes both.

    A sum that is the epilogue of a product is left there. An invariant layer has the
    bits of calls with many rows, which are not traced.
    """
    layer, norm = modules["o_proj"], modules["norm"]
    is_plain = "o_norm" not in modules and spec.add is None
    is_plain = is_plain and type(norm) is nn.RMSNorm
    of_product = type(layer) is MarlinLinear and "residual" in spec.fuse
    invariant = getattr(layer, "invariant", False)
    if "add_norm" in spec.fuse and is_plain and not (of_product or invariant):
        y = layer(attended)
        both = blocks.added_and_normed(x, y, norm["weight"], norm.eps)
        return (x + y, None) if both is None else both
    return _added(spec, modules, "o", attended, x), None


def _gated(spec: BlockSpec, modules: dict[str, Any], x: mx.array) -> mx.array:
    """Returns the gated product of gate and up with normalized x.

    One joined layer takes the norm into its product, and also the gating if that is
    swiglu.
    """
    norm, gating = modules["norm"], spec.gating
    if "joined" not in modules:
        x = norm(x)
        return (gating or swiglu)(modules["gate_proj"](x), modules["up_proj"](x))
    layer: MarlinLinear = modules["joined"]
    if gating is not None or "gate" not in spec.fuse:
        return (gating or swiglu)(*layer.halves(norm(x)))
    if "norm" not in spec.fuse:
        return layer.gated(norm(x))
    y: mx.array = layer.normed(x, norm, gated=True)
    return y


def _is_one_row(x: mx.array, layer: MarlinLinear) -> bool:
    """Returns whether the parts of a joined product are contiguous without a copy.

    An invariant layer makes the same call for one row as for many.
    """
    return x.size == x.shape[-1] and not layer.invariant


def _added(
    spec: BlockSpec, modules: dict[str, Any], name: str, x: mx.array, residual: mx.array
) -> mx.array:
    """Returns the residual plus the product of a layer and its norm, if any.

    A plain sum without a norm is the epilogue of the product, which rounds once. An
    invariant layer rounds twice, as it does in calls with many rows, which are not
    traced.
    """
    layer, norm = modules[f"{name}_proj"], modules.get(f"{name}_norm")
    add = spec.add
    is_plain = norm is None and add is None and "residual" in spec.fuse
    if is_plain and type(layer) is MarlinLinear and not layer.invariant:
        return layer.added(x, residual)
    y: mx.array = layer(x)
    y = y if norm is None else norm(y)
    return residual + y if add is None else add(residual, y)
