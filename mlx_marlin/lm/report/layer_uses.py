"""What a model's layers compute after `optimize`, and which layers it converts."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin import guard
from mlx_marlin.backends import devices
from mlx_marlin.layers.embedding import PackedEmbedding
from mlx_marlin.layers.guarded_parameters import activation_dtype
from mlx_marlin.layers.joined import MarlinPart, whole
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
    UNREAD_EXPERTS,
    LayerConversion,
    has_stock_format,
    is_marlin_layer,
    layout_where_packed,
)
from mlx_marlin.lm.module_tree import common_path, named_layers, pattern
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.gather_plan import AnyProblem
from mlx_marlin.planning.measurement import plain
from mlx_marlin.products import serving
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
class LayerUse:
    """What equal layers of a model compute, and what becomes of them."""

    paths: tuple[str, ...]  # The paths of the layers
    layer: str  # The name of their class
    # "linear", "as_linear", "heads", "heads, not transposed", "experts", "look-up" or
    # "not quantized"
    operation: str
    # The call with one row, whose weight has the layout that it has after `optimize`;
    # None if they multiply by no weight that is quantized
    request: Request | None = None
    dtype: str  # Dtype of the activations
    bias: bool = False  # Whether the product adds a bias
    choices: int = 0  # Experts that a row chooses; 0 if the weights are not experts
    is_converted: bool  # Whether the layers are ours already
    # The layout that they have after `optimize`; None if they are then MLX's
    layout: str | None
    refusal: str | None  # Why they are then MLX's; None if they are not
    action: str  # What `optimize` does: "converts", "keeps" or "restores"
    # The layers; not for a report, which would keep them in memory
    layers: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    @property
    def name(self) -> str:
        """The path of the layers, with "*" in place of numbers that differ."""
        return common_path([*self.paths])

    @property
    def stays(self) -> str | None:
        """Why the layers compute no product of ours, or None."""
        return LOOK_UP if self.operation == "look-up" else self.refusal

    @property
    def call(self) -> Request:
        """The call with one row of layers whose weight is quantized."""
        assert self.request is not None
        return self.request

    @property
    def batch(self) -> tuple[int, ...]:
        """The number of heads or experts; () for one weight."""
        experts = self.call.experts
        return self.call.w_batch if experts is None else (experts.experts,)

    @property
    def title(self) -> str:
        """The shape as k→n, with the number of experts."""
        experts = f", {self.batch[0]} experts" if self.choices else ""
        return f"{self.call.k}→{self.call.n}{experts}"

    def problem(self, m: int, layout: str | None = None) -> AnyProblem | None:
        """Returns what a race times, or None if our kernels do not compute it."""
        found = serving.problem_of(self.at(m, layout))
        return None if isinstance(found, serving.Refusal) else plain(found)

    def at(self, m: int, layout: str | None = None) -> Request:
        """Returns the call with m rows, for experts as mlx-lm makes it."""
        one = self.call
        one = replace(one, layout=layout or one.layout)
        if one.experts is None:
            (*batch, _, inner), outer = one.x_shape, one.shape[-1]
            return replace(one, x_shape=(*batch, m, inner), shape=(*batch, m, outer))
        pairs = m * self.choices
        is_sorted = pairs >= SORTED_PAIRS
        shape = (pairs,) if is_sorted else (m, self.choices)
        return replace(
            one,
            x_shape=(pairs, 1, one.k) if is_sorted else (m, 1, 1, one.k),
            shape=(*shape, 1, one.n),
            experts=replace(one.experts, pairs=shape, is_sorted=is_sorted),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a report decides for."""

    place: serving.Place  # Where calls are served; no kernel is run for it
    # What `optimize` converts, for this process; None for a named chip
    conversion: LayerConversion | None = None
    # Why it leaves the model to stock MLX, or None
    stock: str | None = None
    # Whether it also changes the layers that it has converted before
    changes_ours: bool = False

    @staticmethod
    def of(chip: str | None) -> "Target":
        """Returns the target of a chip's name; None for this process."""
        if chip is None:
            return Target(place=serving.here(guard.known_fault), conversion=DEFAULTS)
        if not isinstance(chip, str):
            raise ValueError(f"chip={chip!r}, expected a name such as 'Apple M3 Max'")
        return Target(place=serving.Place(device=devices.named(chip), is_here=False))

    def becomes(self, layer: Any) -> tuple[str | None, str | None]:
        """Returns the layout of a layer after `optimize`, and why it is MLX's then."""
        ours = is_marlin_layer(layer)
        if ours and not self.changes_ours:
            return layer.layout, None
        conversion = self.conversion
        if conversion is None:
            if (layout := self._layout_on_chip(layer)) is not None:
                return layout, None
            # Other devices may have kernels for experts that this one has not.
            return None, DEFAULTS.why_not(layer) or UNREAD_EXPERTS
        reason = None if ours else conversion.why_not(layer)
        if self.stock is not None and not getattr(layer, "is_packed_only", False):
            return None, reason or self.stock
        if reason is not None:
            return None, reason
        stays = ours and not conversion.applies_to(layer)
        return layer.layout if stays else conversion.layout_of(layer), None

    def action(self, layer: nn.Module) -> str:
        """Returns what `optimize` does with a layer, in a word."""
        if self.stock is not None and has_stock_format(layer):
            return "restores"
        return "keeps" if self.becomes(layer)[0] is None else "converts"

    def _layout_on_chip(self, layer: nn.Module) -> str | None:
        traits = self.place.backend.traits
        if is_experts(layer):
            converts = has_expert_kernels(layer, traits)
        else:
            known = type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
            known = known or is_heads(layer) or is_sharded(layer)
            converts = known and is_supported_format(layer)
        if not converts:
            return None
        packs = traits.default_layout == "marlin"
        return layout_where_packed(layer) if packs else "mlx"


def uses_of(model: nn.Module, target: Target) -> list[LayerUse]:
    """Returns what the layers of a model compute, in the model's order.

    Equal layers at corresponding paths are one use.
    """
    describe = _Describer(model, target)
    found: dict[tuple[str, LayerUse], list[tuple[str, nn.Module]]] = {}
    for path, layer in named_layers(model):
        for use in describe(layer):
            found.setdefault((pattern(path), use), []).append((path, layer))
    return [
        replace(
            use,
            paths=tuple(path for path, _ in named),
            layers=tuple(layer for _, layer in named),
        )
        for (_, use), named in found.items()
    ]


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
    """Describes what a layer computes."""

    def __init__(self, model: nn.Module, target: Target) -> None:
        self._target = target
        self._activations = activation_dtype(model)
        self._choices = setting(model, CHOICES) or 1
        self._is_tied = setting(model, ["tie_word_embeddings"])

    def __call__(self, layer: Any) -> list[LayerUse]:
        if isinstance(layer, nn.QuantizedEmbedding | PackedEmbedding):
            if self._is_tied is False:
                return [self._use(layer, "look-up")]
            return self._quantized(layer, "as_linear")
        if is_experts(layer) or is_marlin_experts(layer):
            return self._quantized(layer, "experts")
        if is_heads(layer) or is_marlin_heads(layer):
            return self._quantized(layer, "heads", "heads, not transposed")
        if has_weight(whole(layer)):
            return self._quantized(layer, "linear")
        if is_plain(layer) or "scales" in layer:
            return [self._use(layer, "not quantized")]
        return []

    def _use(self, layer: Any, operation: str, **values: Any) -> LayerUse:
        own = whole(layer)
        layout, refusal = self._target.becomes(own)
        common = {
            "paths": (),
            "layer": type(layer).__name__,
            "operation": operation,
            "dtype": dtypes.dtype_name(self._activations),
            "is_converted": is_marlin_layer(own),
            "layout": layout,
            "refusal": refusal,
            "action": self._target.action(own),
        }
        return LayerUse(**{**common, **values})

    def _quantized(self, layer: Any, *operations: str) -> list[LayerUse]:
        own = whole(layer)
        scales = own["packed_scales" if "packed_scales" in own else "scales"].dtype
        dtype = dtypes.floating(scales, self._activations)
        # A bias of another dtype would promote the result, and is added afterwards.
        bias = "bias" in own and own["bias"].dtype in (scales, dtype)
        parts = layer.shared.sizes if isinstance(layer, MarlinPart) else ()
        return [
            self._use(
                layer,
                operation,
                request=self._request(own, operation, Epilogue(bias=bias, parts=parts)),
                dtype=dtypes.dtype_name(dtype),
                bias=bias,
                choices=self._choices if operation == "experts" else 0,
            )
            for operation in operations
        ]

    def _request(self, layer: Any, operation: str, epilogue: Epilogue) -> Request:
        """Returns the call with one row; of experts, with one that the row chooses."""
        n, k, group_size, bits, mode, batch, scales = weight_of(layer)
        layout = self._target.becomes(layer)[0] or "mlx"
        dtype = dtypes.floating(scales, self._activations)
        transpose = "not transposed" not in operation
        inner, outer = (k, n) if transpose else (n, k)
        request = Request(
            x_shape=(*batch, 1, inner),
            x_dtype=dtype,
            shape=(*batch, 1, outer),
            dtype=dtypes.result_dtype(dtype, scales),
            n=n,
            k=k,
            w_batch=batch,
            scale_dtype=scales,
            mode=mode,
            bits=bits,
            group_size=group_size,
            transpose=transpose,
            layout=layout,
            on_cpu=False,  # whoever asks who serves knows
            epilogue=epilogue,
            invariant=getattr(layer, "invariant", False) and transpose,
            global_scale=layer.get("global_scale") is not None,
        )
        if operation != "experts":
            return request
        experts = Gather(
            experts=prod(batch),
            pairs=(1, 1),
            rows_are_named=False,
            biased=epilogue.bias and layout == "marlin",
        )
        return replace(request, w_batch=(), epilogue=PLAIN, experts=experts)


def has_weight(layer: nn.Module) -> bool:
    """Returns whether `weight_of` takes a layer: others may have scales too."""
    quantized = "scales" in layer and all(hasattr(layer, name) for name in FORMAT)
    return quantized or is_marlin_layer(layer)


def weight_of(
    layer: Any,
) -> tuple[int, int, int, int, str, tuple[int, ...], mx.Dtype]:
    """Returns n, k, group size, bits, mode, batch and dtype of scales of a weight."""
    if "packed_scales" in layer:
        n, k, group_size, bits, mode, _, _, batch = layer.packed.kind
        return n, k, group_size, bits, mode, batch, layer["packed_scales"].dtype
    scales = layer["scales"]
    *before, n, groups = scales.shape
    k, format = groups * layer.group_size, (layer.group_size, layer.bits, layer.mode)
    return n, k, *format, tuple(before), scales.dtype
