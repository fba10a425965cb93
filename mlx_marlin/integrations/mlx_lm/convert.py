"""Converts the layers of an mlx-lm model, in place, and back."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.integrations.mlx_lm.joining import join_layers, separate_layers
from mlx_marlin.integrations.mlx_lm.known_layers import (
    are_experts_of_ours,
    is_experts,
    is_heads,
    is_marlin_experts,
    is_marlin_heads,
    is_our_format,
    is_packed_faster,
    is_sharded,
    is_tracing_faster,
    marlin_experts,
    marlin_heads,
    multiplies_experts,
)
from mlx_marlin.integrations.mlx_lm.module_changes import Changes, Position, module_at
from mlx_marlin.integrations.mlx_lm.tracing_code import loaded_code, tracing_code
from mlx_marlin.integrations.mlx_lm.warm_up import check_rows, run_once
from mlx_marlin.integrations.mlx_lm.warn_once import warn_once
from mlx_marlin.layers.embedding import MarlinEmbedding
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.weights.formats import CHANNEL, LAYOUTS, format_of

Model = TypeVar("Model", bound=nn.Module)
Convert = Callable[[Any], nn.Module]
Places = list[Position]


def optimize(
    model: Model,
    *,
    layout: str | None = None,
    quantize: bool = False,
    group_size: int | Literal["channel"] = 64,
    bits: int = 4,
    invariant: bool = False,
    join: bool | None = None,
    trace: bool | None = None,
    warm_up: Sequence[int] = (),
    progress: bool = False,
) -> Model:
    """Makes a model's quantized linear layers run on our kernels, in place.

    Takes `nn.QuantizedLinear` layers in a format of ours, mlx-lm's layers of several
    experts or heads and, so that a tied output head runs too, `nn.QuantizedEmbedding`.
    Subclasses, which may do something else, and other formats stay as they are, and so
    do experts that stock MLX would have to serve. Sharded layers stay too, with a
    warning. If anything fails, the model is left as it was.

    Args:
        model: An mlx-lm model or any other `nn.Module`.
        layout: "mlx" keeps the arrays as they are; "marlin" packs all but embeddings,
            so the model can be saved or sharded only after `restore`. Default: on CUDA
            "marlin" for the linear layers that our kernels serve there, which read it
            faster; else "mlx".
        quantize: Quantize `nn.Linear` layers too, where their k is a multiple of
            `group_size`. `restore` leaves these quantized.
        group_size: Weights that share a scale, for layers that are quantized here; with
            `layout="marlin"` also 16, 256 or "channel", a whole row.
        bits: Bits of a code, likewise.
        invariant: Compute each row of every product as if it were alone, so that its
            bits do not depend on the batch. Attention stays MLX's.
        join: Compute layers that share x in one launch: q, k and v, gate and up, where
            their formats are the same. Such a model can be saved or sharded only after
            `restore`. Default: on CUDA, unless the layout is said to be "mlx".
        trace: Compute the decoder blocks of mlx-lm that we know as two traced graphs
            each when there are few rows and a cache, which spares the host work. Sums
            of a product and a residual, and there gate times up, are rounded once.
            Default: on CUDA.
        warm_up: Numbers of rows, such as (1, 2, 4, 8), for which all kernels are built
            and checked before this function returns, with a progress bar: no later call
            with so many rows waits for a compiler. Default: none.
        progress: Show a progress bar; needs tqdm.

    Returns:
        The same model.

    Raises:
        TypeError: If `model` is not an `nn.Module`.
        ValueError: If the layout, group size, bits or `warm_up` are not ours, the model
            has no layer to convert, or `invariant` is asked of a model that keeps
            quantized layers of MLX's.
    """
    _check_model(model)
    if layout not in (None, *LAYOUTS):
        raise ValueError(f"layout={layout!r} is not one of {LAYOUTS}")
    check_rows(warm_up)
    faster = is_tracing_faster()
    join = faster and layout != "mlx" if join is None else join
    trace = faster if trace is None else trace
    format = format_of("affine", bits)
    sizes = format.group_sizes_in(layout or "mlx")
    named = tuple("channel" if each == CHANNEL else each for each in sizes)
    if group_size not in named:
        raise ValueError(f"group_size={group_size!r} is not one of {named}")

    def convert(layer: Any) -> nn.Module:
        kept = layout or default_layout(layer)
        if is_experts(layer) or is_marlin_experts(layer):
            experts: nn.Module = marlin_experts().from_quantized(
                layer, layout=kept, invariant=invariant
            )
            return experts
        if is_heads(layer) or is_marlin_heads(layer):
            heads: nn.Module = marlin_heads().from_quantized(layer, layout=kept)
            return heads
        if type(layer) is nn.QuantizedEmbedding:
            return MarlinEmbedding.from_quantized(layer, invariant=invariant)
        if type(layer) is MarlinEmbedding:
            return MarlinEmbedding.from_quantized(layer, invariant=invariant)
        if type(layer) is nn.Linear:
            return MarlinLinear.from_linear(
                layer, group_size, bits, layout=kept, invariant=invariant
            )
        return MarlinLinear.from_quantized(layer, layout=kept, invariant=invariant)

    def wanted(layer: nn.Module) -> bool:
        if type(layer) is nn.Linear:
            k = layer.weight.shape[1]
            size = k if group_size == "channel" else group_size
            return quantize and format.why_not(size, k, layout or "mlx") is None
        if type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding):
            return is_our_format(layer)
        if is_experts(layer):
            return are_experts_of_ours(layer, invariant)
        if is_heads(layer):
            return not invariant and is_our_format(layer)
        if isinstance(layer, MarlinEmbedding):
            return layer.invariant is not invariant
        if is_marlin_experts(layer) and not multiplies_experts(invariant):
            return False
        if type(layer) is MarlinLinear or is_marlin_experts(layer):
            kept = layout or default_layout(layer)
            return layer.layout != kept or layer.invariant is not invariant
        if is_marlin_heads(layer):
            return bool(layer.layout != (layout or default_layout(layer)))
        return False

    if not any(wanted(each) or _is_ours(each) for each in _computing_layers(model)):
        raise ValueError(
            "model has no layer to convert: expected nn.QuantizedLinear in a format of "
            "ours, not sharded, or quantize=True for nn.Linear"
        )
    if invariant:
        _refuse_variance(model, wanted)
    _report_sharded(model)
    changes = Changes()
    try:
        separate_layers(model, changes)
        _replace(_find(model, wanted), convert, progress, changes)
        if join:
            join_layers(model, changes)
        _set_tracing(model, trace, changes)
        run_once(model, warm_up)
    except BaseException:
        changes.undo()
        raise
    return model


def default_layout(layer: nn.Module) -> str:
    """Returns the layout that `optimize` gives a layer without being asked for one.

    On CUDA "marlin" where our kernels multiply: heads that also want products with
    weights as they are, and activations in float32 are stock MLX's, which would have to
    unpack them. Scales that are bytes do not tell the activations' dtype: such
    a layer is packed, and a model in float32 should be given `layout="mlx"`.
    """
    if not is_packed_faster():
        return "mlx"
    if type(layer) is nn.Linear:
        scales = layer.weight
    elif (
        type(layer) in (nn.QuantizedLinear, MarlinLinear)
        or is_experts(layer)
        or is_marlin_experts(layer)
    ):
        packed = getattr(layer, "layout", "mlx") == "marlin"
        scales = layer["quantizers" if packed else "scales"]
    else:
        return "mlx"
    return "mlx" if scales.dtype == mx.float32 else "marlin"


def restore(model: Model, *, progress: bool = False) -> Model:
    """Turns the layers that `optimize` made back into MLX's own, in place.

    Args:
        model: A model that `optimize` converted.
        progress: Show a progress bar; needs tqdm.

    Returns:
        The same model, with every code, scale and bias as it was.

    Raises:
        TypeError: If `model` is not an `nn.Module`.
    """
    _check_model(model)
    changes = Changes()
    try:
        _set_tracing(model, False, changes)
        separate_layers(model, changes)
        ours = _find(model, _is_ours)
        _replace(ours, lambda layer: layer.to_stock(), progress, changes)
    except BaseException:
        changes.undo()
        raise
    return model


def _check_model(model: object) -> None:
    if isinstance(model, nn.Module):
        return
    hint = ": mlx_lm.load returns the model and its tokenizer, pass only the model"
    raise TypeError(
        f"model must be an nn.Module, got {type(model).__name__}"
        + (hint if isinstance(model, tuple) else "")
    )


def _set_tracing(model: nn.Module, trace: bool, changes: Changes) -> None:
    if "mlx_lm.models.base" not in sys.modules:
        return  # the model has no block of mlx-lm's
    code: Any = tracing_code() if trace else loaded_code()
    if code is not None:
        (code.trace_blocks if trace else code.untrace_blocks)(model, changes)


def _refuse_variance(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> None:
    """Refuses a model some of whose quantized layers would stay MLX's.

    Layers of floats are no hindrance that we could name: what they do to a row is
    MLX's promise, as attention is.
    """

    def stays(layer: nn.Module) -> bool:
        if is_sharded(layer):
            return True
        quantized = isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding)
        if quantized or is_experts(layer) or is_heads(layer):
            return not _is_ours(layer) and not wanted(layer)
        if is_marlin_experts(layer):
            return not multiplies_experts(invariant=True)
        return is_marlin_heads(layer)

    left = [layer for layer in _computing_layers(model) if stays(layer)]
    if left:
        raise ValueError(
            f"invariant=True: {len(left)} quantized layers have no such kernel of ours "
            f"here and would stay MLX's, such as {left[0]}"
        )


def _report_sharded(model: nn.Module) -> None:
    """Warns once per process that sharded layers are not converted."""
    sharded = _find(model, is_sharded)
    if sharded:
        warn_once(
            "sharded layers",
            f"{len(sharded)} sharded layers, such as {module_at(sharded[0])}, are not "
            f"converted: stock MLX computes them",
        )


def _find(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[Places]:
    """Finds where the wanted layers hang; a shared layer has several places."""
    found: dict[int, Places] = {}
    for container, key in _places(model):
        if wanted(container[key]):
            found.setdefault(id(container[key]), []).append((container, key))
    return [*found.values()]


def _computing_layers(model: nn.Module) -> list[nn.Module]:
    """Returns a model's layers, with one product for layers that are joined."""
    found: dict[int, nn.Module] = {}
    for container, key in _places(model):
        layer = container[key]
        layer = layer.shared.layer if isinstance(layer, MarlinPart) else layer
        found[id(layer)] = layer
    return [*found.values()]


def _places(tree: Any) -> Iterator[Position]:
    # As `nn.Module.leaf_modules` looks for them: in modules, dictionaries and lists.
    for key, child in enumerate(tree) if isinstance(tree, list) else tree.items():
        if isinstance(child, nn.Module) and not child.children():
            yield tree, key
        elif isinstance(child, dict | list):
            yield from _places(child)


def _replace(
    found: list[Places], convert: Convert, progress: bool, changes: Changes
) -> None:
    """Converts layers.

    One by one and without holding on to the layers, so that a large model needs memory
    for one layer more.
    """
    for places in _shown(found, progress):
        layer = module_at(places)
        new = convert(layer)
        mx.eval(new.parameters())
        changes.replace([places], [new], _rebuilding(_way_back(layer)))


def _rebuilding(back: Convert) -> Callable[[list[Any]], list[nn.Module]]:
    return lambda modules: [back(each) for each in modules]


def _way_back(layer: nn.Module) -> Convert:
    if type(layer) is nn.Linear:
        return lambda _: layer  # quantizing lost something
    if isinstance(layer, MarlinEmbedding):
        return partial(MarlinEmbedding.from_quantized, invariant=layer.invariant)
    ours: Any = type(layer)
    if isinstance(layer, MarlinLinear) or is_marlin_experts(layer):
        return partial(
            ours.from_quantized,
            layout=layer.layout,
            invariant=layer.invariant,
        )
    if is_marlin_heads(layer):
        return partial(ours.from_quantized, layout=layer.layout)
    return lambda new: new.to_stock()


def _is_ours(layer: nn.Module) -> bool:
    ours = type(layer) in (MarlinLinear, MarlinEmbedding)
    return ours or is_marlin_experts(layer) or is_marlin_heads(layer)


def _shown(found: list[Places], progress: bool) -> Iterable[Places]:
    if not progress:
        return found
    from tqdm import tqdm

    shown: Iterable[Places] = tqdm(found, "mlx_marlin", unit="layer")
    return shown
