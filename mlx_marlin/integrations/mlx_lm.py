"""Converts the layers of an mlx-lm model, in place, and back."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_marlin.formats import FORMATS, LAYOUTS
from mlx_marlin.nn import MarlinEmbedding, MarlinLinear

Model = TypeVar("Model", bound=nn.Module)
Convert = Callable[[nn.Module], nn.Module]


def optimize(
    model: Model,
    *,
    layout: str = "mlx",
    quantize: bool = False,
    group_size: int = 64,
    bits: int = 4,
    progress: bool = False,
) -> Model:
    """Makes a model's quantized linear layers run on our kernels, in place.

    Takes `nn.QuantizedLinear` layers in a format of ours (affine 4-bit) and, so that a
    tied output head runs too, `nn.QuantizedEmbedding`. Subclasses, which may do
    something else, and other formats stay as they are. If a layer cannot be converted,
    those before it are turned back.

    Args:
        model: An mlx-lm model or any other `nn.Module`.
        layout: "mlx" keeps the arrays as they are; "marlin" packs the linear layers,
            so the model can be saved for stock MLX only after `restore`.
        quantize: Quantize `nn.Linear` layers too, where their k is a multiple of
            `group_size`. `restore` leaves these quantized.
        group_size: Weights that share a scale, for layers that are quantized here.
        bits: Bits of a code, likewise.
        progress: Show a progress bar; needs tqdm.

    Returns:
        The same model.

    Raises:
        ValueError: If the layout is unknown or the model has no layer to convert.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {LAYOUTS}")

    def convert(layer: nn.Module) -> nn.Module:
        if type(layer) is nn.QuantizedEmbedding:
            return MarlinEmbedding.from_quantized(layer)
        if type(layer) is nn.Linear:
            return MarlinLinear.from_linear(layer, group_size, bits, layout=layout)
        return MarlinLinear.from_quantized(layer, layout=layout)

    def wanted(layer: nn.Module) -> bool:
        if type(layer) is nn.Linear:
            return quantize and layer.weight.shape[1] % group_size == 0
        if type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding):
            return _is_our_format(layer)
        return type(layer) is MarlinLinear and layer.layout != layout

    layers = [(path, layer) for path, layer in _leaves(model) if wanted(layer)]
    if not layers and not any(_is_ours(layer) for _, layer in _leaves(model)):
        raise ValueError(
            "model has no layer to convert: expected nn.QuantizedLinear, affine 4-bit "
            "with group size 32, 64 or 128, or quantize=True for nn.Linear"
        )
    _replace(model, layers, convert, progress)
    return model


def restore(model: Model, *, progress: bool = False) -> Model:
    """Turns the layers that `optimize` made back into MLX's own, in place.

    Args:
        model: A model that `optimize` converted.
        progress: Show a progress bar; needs tqdm.

    Returns:
        The same model, with every code, scale and bias as it was.
    """
    layers = [(path, layer) for path, layer in _leaves(model) if _is_ours(layer)]
    _replace(model, layers, lambda layer: layer.to_stock(), progress)
    return model


def _replace(
    model: nn.Module,
    layers: list[tuple[str, nn.Module]],
    convert: Convert,
    progress: bool,
) -> None:
    # One by one, so that a large model needs memory for one layer more. Turning back
    # needs the old layer only where quantizing lost something.
    done: list[tuple[str, nn.Module | None]] = []
    try:
        for path, layer in _shown(layers, progress):
            new = convert(layer)
            mx.eval(new.parameters())
            done.append((path, layer if type(layer) is nn.Linear else None))
            _put(model, path, new)
    except BaseException:
        now = dict(_leaves(model))
        for path, old in done:
            _put(model, path, old or now[path].to_stock())
        raise


def _put(model: nn.Module, path: str, layer: nn.Module) -> None:
    model.update_modules(tree_unflatten([(path, layer)]))


def _leaves(model: nn.Module) -> list[tuple[str, Any]]:
    leaves = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    return [(path, layer) for path, layer in leaves if path]


def _is_ours(layer: nn.Module) -> bool:
    return type(layer) in (MarlinLinear, MarlinEmbedding)


def _is_our_format(layer: nn.Module) -> bool:
    known = FORMATS.get((layer.mode, layer.bits))
    return known is not None and layer.group_size in known.group_sizes


def _shown(
    layers: list[tuple[str, nn.Module]], progress: bool
) -> Iterable[tuple[str, nn.Module]]:
    if not progress:
        return layers
    from tqdm import tqdm

    return tqdm(layers, desc="mlx_marlin", unit="layer")
