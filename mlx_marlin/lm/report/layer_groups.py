"""Finds the products that a model's layers compute, and groups equal layers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn

from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.layers.native import activation_dtype
from mlx_marlin.layers.packed_embedding import PackedEmbedding
from mlx_marlin.lm.known_layers import (
    is_experts,
    is_heads,
    is_marlin_experts,
    is_marlin_heads,
    is_plain,
)
from mlx_marlin.lm.layer_conversion import (
    NOT_QUANTIZED,
    is_marlin_layer,
)
from mlx_marlin.lm.module_tree import (
    common_path,
    named_layers,
    pattern,
)
from mlx_marlin.lm.report.layer_product import LayerProduct, Weight
from mlx_marlin.lm.report.target import Target
from mlx_marlin.weights import dtypes

CHOICES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "top_k_experts",
)
"""Names of mlx-lm's settings for the experts that a row chooses."""
FORMAT = ("group_size", "bits", "mode")
"""Attributes of a quantized layer."""
LOOK_UP = "only looked up: the output head is another layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that compute the same product, at corresponding positions of a model."""

    name: str  # The path of the layers, with "*" in place of numbers that differ
    count: int  # Number of layers
    product: LayerProduct  # What each of them computes


def groups_of(model: nn.Module, target: Target) -> list[LayerGroup]:
    """Returns the groups of a model's layers, in the model's order."""
    found: dict[tuple[str, LayerProduct], list[str]] = {}
    for path, _, product in described(model, target):
        found.setdefault((pattern(path), product), []).append(path)
    return [
        LayerGroup(name=common_path(paths), count=len(paths), product=product)
        for (_, product), paths in found.items()
    ]


def described(
    model: nn.Module, target: Target
) -> Iterator[tuple[str, nn.Module, LayerProduct]]:
    """Yields the path of each layer, the layer, and each product that it computes."""
    describe = _Describer(model, target)
    for path, layer in named_layers(model):
        for product in describe(layer):
            yield path, layer, product


def setting(model: nn.Module, names: Iterable[str]) -> Any:
    """Returns the first setting of a model with one of some names, or None.

    mlx-lm keeps settings as the attribute `args` or `config` of modules.
    """
    for module in model.modules():
        for holder in (getattr(module, "args", None), getattr(module, "config", None)):
            for name in names:
                value = getattr(holder, name, None)
                if value is not None:
                    return value
    return None


class _Describer:
    """Describes the products of a layer."""

    def __init__(self, model: nn.Module, target: Target) -> None:
        self._target = target
        self._activations = activation_dtype(model)
        self._choices = setting(model, CHOICES)
        self._is_tied = setting(model, ["tie_word_embeddings"])

    def __call__(self, layer: Any) -> list[LayerProduct]:
        if isinstance(layer, MarlinPart):
            (whole,) = self._quantized(layer.shared.layer, "linear")
            return [replace(whole, layer="MarlinPart", parts=layer.shared.sizes)]
        if isinstance(layer, nn.QuantizedEmbedding | PackedEmbedding):
            if self._is_tied is False:
                return [self._plain(layer, LOOK_UP)]
            return self._quantized(layer, "as_linear")
        if is_experts(layer) or is_marlin_experts(layer):
            return self._quantized(layer, "experts")
        if is_heads(layer) or is_marlin_heads(layer):
            return self._quantized(layer, "heads", "heads, not transposed")
        if has_weight(layer):
            return self._quantized(layer, "linear")
        return [self._plain(layer, NOT_QUANTIZED)] if is_plain(layer) else []

    def _plain(self, layer: nn.Module, reason: str) -> LayerProduct:
        return LayerProduct(
            layer=type(layer).__name__,
            operation="look-up" if reason is LOOK_UP else "not quantized",
            weight=None,
            dtype=dtypes.dtype_name(self._activations),
            is_converted=is_marlin_layer(layer),
            stays=reason,
        )

    def _quantized(self, layer: Any, *operations: str) -> list[LayerProduct]:
        ours = is_marlin_layer(layer)
        layout = _layout(layer) if ours else self._target.layout_after(layer)
        stays = self._target.why_not(layer) if layout is None else None
        scales = layer["packed_scales" if "packed_scales" in layer else "scales"].dtype
        dtype = dtypes.floating(scales, self._activations)
        weight = weight_of(layer, layout or "mlx")
        # A bias of another dtype would promote the result, and is added afterwards.
        bias = "bias" in layer and layer["bias"].dtype in (scales, dtype)
        return [
            LayerProduct(
                layer=type(layer).__name__,
                operation=operation,
                weight=weight,
                dtype=dtypes.dtype_name(dtype),
                is_converted=ours,
                stays=stays,
                bias=bias,
                invariant=getattr(layer, "invariant", False)
                and "not transposed" not in operation,
                choices=(self._choices or 1) if operation == "experts" else 0,
            )
            for operation in operations
        ]


def _layout(layer: Any) -> str:
    layout: str = getattr(layer, "layout", "mlx")
    return layout


def has_weight(layer: nn.Module) -> bool:
    """Returns whether `weight_of` takes a layer: others may have scales too."""
    quantized = "scales" in layer and all(hasattr(layer, name) for name in FORMAT)
    return quantized or is_marlin_layer(layer)


def weight_of(layer: Any, layout: str) -> Weight:
    """Returns a layer's weight, as if it had a layout."""
    if "packed_scales" in layer:
        scales = layer["packed_scales"]
        n, k, group_size, bits, mode, _, _, batch = layer.packed.kind
    else:
        scales = layer["scales"]
        group_size, bits, mode = layer.group_size, layer.bits, layer.mode
        *before, n, groups = scales.shape
        k, batch = groups * group_size, tuple(before)
    return Weight(
        n=n,
        k=k,
        mode=mode,
        bits=bits,
        group_size=group_size,
        scale_dtype=dtypes.dtype_name(scales.dtype),
        layout=layout,
        batch=batch,
        global_scale=layer.get("global_scale") is not None,
    )
