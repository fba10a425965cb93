"""Decides which layers `optimize` converts, and converts them."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.layers.embedding import MarlinEmbedding, PackedEmbedding
from mlx_marlin.layers.joined import MarlinPart, can_join, join, separate
from mlx_marlin.layers.linear import SHARDED, MarlinLinear, class_for
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm.known_layers import (
    are_supported_experts,
    is_experts,
    is_heads,
    is_marlin_experts,
    is_marlin_heads,
    is_packed_faster,
    is_plain,
    is_sharded,
    marlin_experts,
    marlin_heads,
    supports_experts,
    supports_heads,
    why_not_supported,
)
from mlx_marlin.lm.module_tree import (
    Changes,
    Position,
    Positions,
    Rebuild,
    containers,
    entries,
    find_layers,
    module_at,
    modules,
    one_at_a_time,
)
from mlx_marlin.products.reference.weight import rounds_biases
from mlx_marlin.progress import shown
from mlx_marlin.regular_files import quoted
from mlx_marlin.warn_once import warn_once
from mlx_marlin.weights.formats import CHANNEL, LAYOUTS, format_of

Convert = Callable[[Any], nn.Module]
STAYS_STOCK = "stays_stock"
"""Attribute of layers that stay on stock MLX: `verify` found too large an error."""
NOT_QUANTIZED = "not quantized; optimize(model, quantize=True) quantizes linear layers"
UNREAD_EXPERTS = (
    "our kernels for experts do not run here, or do not take such scales, a global "
    "scale, or invariant=True"
)
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that have the same input in mlx-lm's models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConversion:
    """Conversion of single layers; the attributes are the options of `optimize`."""

    layout: str | None = None
    quantize: bool = False
    group_size: int | Literal["channel"] = 64
    bits: int = 4
    invariant: bool = False

    def __post_init__(self) -> None:
        if self.layout not in (None, *LAYOUTS):
            raise ValueError(f"layout={self.layout!r} is not one of {LAYOUTS}")
        sizes = format_of("affine", self.bits).group_sizes_in(self.layout or "mlx")
        named = tuple("channel" if size == CHANNEL else size for size in sizes)
        if self.group_size not in named:
            raise ValueError(f"group_size={self.group_size!r} is not one of {named}")

    def applies_to(self, layer: nn.Module) -> bool:
        """Returns whether a layer is to be converted."""
        return self.why_not(layer) is None

    def why_not(self, layer: Any) -> str | None:
        """Returns why a layer stays as it is; None if it is to be converted."""
        if getattr(layer, STAYS_STOCK, False):
            return "its error was above the limit of mlx-marlin verify"
        if is_marlin_layer(layer):
            return None if self._changes(layer) else "it is as asked for"
        if is_plain(layer):
            return self._why_not_quantized(layer)
        known = type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
        experts, heads, sharded = is_experts(layer), is_heads(layer), is_sharded(layer)
        if not (known or experts or heads or sharded):
            return f"optimize does not convert a {type(layer).__name__}"
        if reason := why_not_supported(layer):
            return reason
        if experts and not are_supported_experts(layer, self.invariant):
            return UNREAD_EXPERTS
        is_variant = self.invariant if sharded else not supports_heads(self.invariant)
        if (heads or sharded) and is_variant:
            return "sums of machines, and heads on CUDA, are not invariant"
        return None

    def convert(self, layer: Any) -> nn.Module:
        """Returns the converted layer of a layer that `applies_to` accepts."""
        layout, invariant = self.layout_of(layer), self.invariant
        if type(layer) is nn.Linear:
            return MarlinLinear.from_linear(
                layer, self.group_size, self.bits, layout=layout, invariant=invariant
            )
        converted: nn.Module = _class_for(layer).from_quantized(
            layer, layout=layout, invariant=invariant
        )
        return converted

    def layout_of(self, layer: nn.Module) -> str:
        """Returns the layout that the converted layer has."""
        if getattr(layer, "is_packed_only", False):
            return "marlin"
        if type(layer) in (nn.QuantizedEmbedding, MarlinEmbedding):
            return "mlx"
        return self.layout or default_layout(layer)

    def _wrong_size(self, layer: nn.Linear) -> str | None:
        k = layer.weight.shape[1]
        size = k if self.group_size == "channel" else self.group_size
        format = format_of("affine", self.bits)
        return format.why_not(size, k, self.layout or "mlx")

    def _why_not_quantized(self, layer: nn.Module) -> str | None:
        if not self.quantize:
            return NOT_QUANTIZED
        if type(layer) is not nn.Linear:
            return "quantize=True quantizes nn.Linear layers only"
        return self._wrong_size(layer)

    def _changes(self, layer: Any) -> bool:
        """Returns whether a converted layer has other options."""
        if is_marlin_heads(layer) and not supports_heads(self.invariant):
            return False
        if is_marlin_experts(layer) and not supports_experts(self.invariant):
            return False
        changed = layer.layout != self.layout_of(layer)
        return changed or layer.invariant is not self.invariant


def _class_for(layer: nn.Module) -> Any:
    """Returns our class for a quantized layer of MLX's or mlx-lm's, or of ours."""
    if is_experts(layer) or is_marlin_experts(layer):
        return marlin_experts()
    if is_heads(layer) or is_marlin_heads(layer):
        return marlin_heads()
    if is_sharded(layer) or type(layer) in SHARDED:
        return class_for(layer)
    if type(layer) in (nn.QuantizedEmbedding, MarlinEmbedding):
        return MarlinEmbedding
    return PackedEmbedding if isinstance(layer, PackedEmbedding) else MarlinLinear


def default_layout(layer: nn.Module) -> str:
    """Returns the layout that a layer gets by default.

    That is "marlin", if the back end prefers it, for layers whose products run on our
    kernels. Heads also need the transposed product, and activations in float32 are
    served by stock MLX; packed weights would have to be unpacked for either. If scales
    are bytes, the dtype of activations is unknown and the layer is packed: give a model
    in float32 with such scales `layout="mlx"`.
    """
    return layout_where_packed(layer) if is_packed_faster() else "mlx"


def layout_where_packed(layer: nn.Module) -> str:
    """Returns the default layout of a layer where packed weights are faster."""
    if type(layer) is nn.Linear:
        scales = layer.weight
    elif (
        type(layer) in (nn.QuantizedLinear, MarlinLinear, *SHARDED)
        or is_sharded(layer)
        or is_experts(layer)
        or is_marlin_experts(layer)
    ):
        packed = getattr(layer, "layout", "mlx") == "marlin"
        scales = layer["packed_scales" if packed else "scales"]
    else:
        return "mlx"
    return "mlx" if scales.dtype == mx.float32 else "marlin"


def is_marlin_layer(layer: nn.Module) -> bool:
    """Returns whether `optimize` or `load` has made a layer ours."""
    ours = (MarlinLinear, MarlinEmbedding, PackedEmbedding, *SHARDED)
    known = type(layer) in ours
    return known or is_marlin_experts(layer) or is_marlin_heads(layer)


def has_stock_format(layer: nn.Module) -> bool:
    """Returns whether a layer is ours, and MLX's layer of it has the same weights."""
    return is_marlin_layer(layer) and not getattr(layer, "is_packed_only", False)


def can_unpack(layer: nn.Module) -> bool:
    """Returns whether a layer is packed, and MLX's layout has the same weights."""
    return has_stock_format(layer) and layer.layout == "marlin"


def to_stock(layer: Any) -> nn.Module:
    """Returns MLX's layer of one of ours; warns once if that rounds a weight."""
    packed = getattr(layer, "packed", None)
    if packed is not None and (
        packed.global_scale is not None
        or packed.mode == "codebook"
        or rounds_biases(packed)
        or isinstance(layer, PackedEmbedding)
    ):
        warn_once(
            "restored with rounding",
            f"restore rounds weights, such as those of {layer}: MLX has neither "
            f"integer zero points, nor codebooks, nor global scales of linear layers, "
            f"nor embeddings in some formats",
        )
    stock: nn.Module = layer.to_stock()
    return stock


def inverse(layer: nn.Module) -> Convert:
    """Returns a function that converts a converted layer back into a layer like this.

    It refers to the layer itself only if the conversion loses information.
    """
    if type(layer) is nn.Linear or getattr(layer, "is_packed_only", False):
        return lambda _: layer  # the other layer has rounded numbers or another format
    cls: Any = type(layer)
    if is_marlin_layer(layer):
        return partial(
            cls.from_quantized, layout=layer.layout, invariant=layer.invariant
        )
    return lambda new: new.to_stock()


def replace_layers(
    found: Sequence[Positions], convert: Convert, progress: bool, changes: Changes
) -> None:
    """Converts layers one by one, with a progress bar if `progress` is true.

    It holds no reference to a layer, so that a large model needs memory for one
    additional layer only.
    """
    for positions in shown(found, "mlx_marlin", "layer") if progress else found:
        layer = module_at(positions)
        changes.replace([positions], [convert(layer)], partial(map, inverse(layer)))


def join_layers(model: nn.Module, changes: Changes) -> None:
    """Joins the layers with the same input whose formats are the same."""
    uses = Counter(id(child) for module in modules(model) for child in module.values())
    for module in modules(model):
        for names in SAME_INPUT:
            layers: list[Any] = [module.get(name) for name in names]
            # A layer that two modules share could be joined differently in each.
            unshared = all(uses[id(layer)] == 1 for layer in layers)
            if unshared and can_join(layers):
                positions = [[(module, name)] for name in names]
                changes.replace(positions, join(layers), _separated)


def separate_layers(model: nn.Module, changes: Changes) -> None:
    """Replaces all parts of joined layers, also those in adapters, by layers."""
    groups: dict[int, dict[int, list[Position]]] = {}
    for container in containers(model):
        for key, child in entries(container):
            if isinstance(child, MarlinPart):
                group = groups.setdefault(id(child.shared), {})
                group.setdefault(child.index, []).append((container, key))
    for positions in groups.values():
        _separate(positions, changes)


def _separate(positions: dict[int, list[Position]], changes: Changes) -> None:
    """Replaces the parts of one joined layer by layers."""
    indices = sorted(positions)
    parts = [module_at(positions[index]) for index in indices]
    layers = separate(parts[0].shared)
    own = [layers[index] for index in indices]
    # If a part is missing from the model, the others cannot be joined again.
    rebuild: Rebuild = join if len(own) == len(layers) else lambda _: parts
    changes.replace([positions[index] for index in indices], own, rebuild)


def _separated(parts: list[MarlinPart]) -> list[MarlinLinear]:
    return separate(parts[0].shared)


@one_at_a_time
def keep_on_stock(model: nn.Module, names: Collection[str]) -> None:
    """Converts layers back to MLX's own, in place, and excludes them from `optimize`.

    Joined layers are separated, and those that can be are joined again. If an error
    occurs, the model is left unchanged.
    """
    with Changes() as changes:
        is_joined = any(isinstance(module, MarlinPart) for module in model.modules())
        separate_layers(model, changes)
        layers = [_quantized_layer(model, name) for name in names]
        wanted = {id(layer) for layer in layers if is_marlin_layer(layer)}
        found = find_layers(model, lambda layer: id(layer) in wanted)
        replace_layers(found, lambda layer: layer.to_stock(), False, changes)
        if is_joined:
            join_layers(model, changes)
    modules = dict(model.named_modules())
    for name in names:
        setattr(_inner(modules[name]), STAYS_STOCK, True)


def stock_layers(model: nn.Module) -> list[str]:
    """Returns the paths of the layers that `keep_on_stock` has converted."""
    named = model.named_modules()
    inner = {id(m.linear) for _, m in named if isinstance(m, ReorderedLinear)}
    return [
        name
        for name, module in named
        if id(module) not in inner and getattr(_inner(module), STAYS_STOCK, False)
    ]


def _quantized_layer(model: nn.Module, name: str) -> Any:
    own = _inner(dict(model.named_modules()).get(name))
    if own is None or not (hasattr(own, "bits") or getattr(own, STAYS_STOCK, False)):
        raise ValueError(f"{quoted(name)} is not a quantized layer of the model")
    return own


def _inner(module: Any) -> Any:
    return module.linear if isinstance(module, ReorderedLinear) else module
