"""The products that a model's layers compute after `optimize`, here or on a chip."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn

from mlx_marlin import guard
from mlx_marlin.backends import devices
from mlx_marlin.backends.base import Backend
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.layers.native import activation_dtype
from mlx_marlin.layers.packed_embedding import PackedEmbedding
from mlx_marlin.lm.known_layers import (
    has_expert_kernels,
    is_experts,
    is_heads,
    is_marlin_experts,
    is_marlin_heads,
    is_plain,
    is_sharded,
    is_supported_format,
)
from mlx_marlin.lm.layer_conversion import (
    NOT_QUANTIZED,
    LayerConversion,
    is_marlin_layer,
    layout_where_packed,
)
from mlx_marlin.lm.measured_models import MeasuredModel
from mlx_marlin.lm.module_tree import (
    common_path,
    named_layers,
    pattern,
)
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.products import serving, this_machine
from mlx_marlin.products.request import Gather, Request
from mlx_marlin.weights import dtypes

DEFAULTS = LayerConversion()
"""What `optimize(model)` converts where nothing was measured."""
SORTED_PAIRS = 64
"""Pairs from which mlx-lm sorts the experts."""
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
class Target:
    """What a report decides for."""

    device: PlanningDevice  # The device to plan for
    # Whether this process decides, with its back end, its default device and measured
    # results. Otherwise the model decides for a GPU of this kind
    is_here: bool
    # The settings that tuning found for the model, which `optimize` uses
    measured: MeasuredModel | None = None
    # The layout that tuning or the race found for the model, or None
    layout: str | None = None

    @staticmethod
    def of(chip: str | None) -> "Target":
        """Returns the target of a chip's name; None for this process."""
        if chip is None:
            return Target(device=this_machine.device(), is_here=True)
        if not isinstance(chip, str):
            raise ValueError(f"chip={chip!r}, expected a name such as 'Apple M3 Max'")
        return Target(device=devices.named(chip), is_here=False)

    @property
    def serving(self) -> serving.Place:
        """What `serve` decides for; it runs no kernels."""
        fault = guard.known_fault if self.is_here else None
        return serving.Place(device=self.device, is_here=self.is_here, fault=fault)

    @property
    def backend(self) -> Backend:
        """The back end of the device."""
        return self.serving.backend

    @property
    def on_cpu(self) -> bool:
        """Whether calls run on the CPU."""
        return self.serving.on_cpu

    def layout_after(self, layer: nn.Module) -> str | None:
        """Returns the layout that `optimize` gives a layer of MLX's or mlx-lm's.

        None if `optimize` does not convert it.
        """
        if self.is_here:
            conversion = self._conversion
            applies = conversion is not None and conversion.applies_to(layer)
            return conversion.layout_of(layer) if conversion and applies else None
        if not self._converts(layer):
            return None
        packs = self.backend.traits.default_layout == "marlin"
        return layout_where_packed(layer) if packs else "mlx"

    def why_not(self, layer: nn.Module) -> str:
        """Returns why `optimize` does not convert a layer."""
        if self.measured is not None and DEFAULTS.applies_to(layer):
            return self.measured.reason
        return DEFAULTS.why_not(layer)

    @property
    def _conversion(self) -> LayerConversion | None:
        """What `optimize` converts in this process; None if stock MLX is faster."""
        if self.measured is not None and self.measured.settings is None:
            return None
        return replace(DEFAULTS, layout=self.layout)

    def _converts(self, layer: nn.Module) -> bool:
        if is_experts(layer):
            return has_expert_kernels(layer, self.backend.traits)
        known = type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
        known = known or is_heads(layer) or is_sharded(layer)
        return known and is_supported_format(layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A quantized weight, or several of one shape."""

    n: int  # Rows of the weight
    k: int  # Columns of the weight
    mode: str  # The quantization scheme
    bits: int  # Bits of a code
    group_size: int  # Weights that share a scale
    scale_dtype: str  # Dtype of the scales
    layout: str  # "mlx" or "marlin"
    batch: tuple[int, ...] = ()  # Number of heads or experts; () for one weight
    global_scale: bool = False  # Whether there is a global scale


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProduct:
    """What a layer computes."""

    layer: str  # The class of the layer
    # "linear", "as_linear", "heads", "heads, not transposed" or "experts"
    operation: str
    # The weight, in the layout that it has after `optimize`; None if the layer
    # multiplies by none that is quantized
    weight: Weight | None
    dtype: str  # Dtype of the activations
    is_converted: bool  # Whether the layer is one of ours already
    # Why `optimize` leaves the layer to stock MLX; None if it does not
    stays: str | None = None
    bias: bool = False  # Whether the product adds a bias
    parts: tuple[int, ...] = ()  # Rows of the layers that are joined
    invariant: bool = False  # Whether a row's bits must not depend on the other rows
    choices: int = 0  # Experts that a row chooses; 0 if the weights are not experts

    def request(self, m: int, on_cpu: bool, biased: bool = False) -> Request:
        """Returns the call of the layer, for experts as mlx-lm makes it.

        `biased`: whether the kernel of experts adds the layer's bias.
        """
        w, transpose = self.weight, "not transposed" not in self.operation
        assert w is not None
        x_dtype, scale_dtype = dtypes.dtype(self.dtype), dtypes.dtype(w.scale_dtype)
        inner, outer = (w.k, w.n) if transpose else (w.n, w.k)
        request = Request(
            x_shape=(*w.batch, m, inner),
            x_dtype=x_dtype,
            shape=(*w.batch, m, outer),
            dtype=dtypes.result_dtype(x_dtype, scale_dtype),
            n=w.n,
            k=w.k,
            w_batch=w.batch,
            scale_dtype=scale_dtype,
            mode=w.mode,
            bits=w.bits,
            group_size=w.group_size,
            transpose=transpose,
            layout=w.layout,
            on_cpu=on_cpu,
            epilogue=Epilogue(bias=self.bias, parts=self.parts),
            invariant=self.invariant,
            global_scale=w.global_scale,
        )
        return self._of_experts(request, m, biased) if self.choices else request

    def _of_experts(self, request: Request, m: int, biased: bool) -> Request:
        pairs = m * self.choices
        is_sorted = pairs >= SORTED_PAIRS
        shape = (pairs,) if is_sorted else (m, self.choices)
        return replace(
            request,
            x_shape=(pairs, 1, request.k) if is_sorted else (m, 1, 1, request.k),
            shape=(*shape, 1, request.n),
            w_batch=(),
            epilogue=PLAIN,
            experts=Gather(
                experts=request.w_batch[0],
                pairs=shape,
                rows_are_named=False,
                is_sorted=is_sorted,
                biased=biased and self.bias,
            ),
        )


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
