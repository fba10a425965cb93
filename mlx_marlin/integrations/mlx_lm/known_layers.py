"""Which of a model's layers are mlx-lm's or ours, and where kernels multiply them.

Nothing here imports mlx-lm, which a model without its layers does not need.
"""

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.backends import selection
from mlx_marlin.products import eligibility
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES, FORMATS


def are_kernels_active() -> bool:
    """Returns whether our kernels run on the device here and on the default device."""
    if eligibility.unsupported_device() is not None:
        return False
    return eligibility.not_here(mx.default_device() == mx.Device(mx.cpu)) is None


def is_packed_faster() -> bool:
    """Returns whether our kernels run here, and packed layers are the faster ones."""
    return selection.traits().default_layout == "marlin" and are_kernels_active()


def is_routing_fused() -> bool:
    """Returns whether kernels of ours choose experts here and add up their results."""
    return selection.active().routing is not None and are_kernels_active()


def is_tracing_faster() -> bool:
    """Returns whether our kernels run here, and joined and traced layers are faster."""
    return selection.traits().replays_graphs and are_kernels_active()


def is_experts(layer: nn.Module) -> bool:
    """Returns whether a layer is mlx-lm's for several experts."""
    return _is_of_mlx_lm(layer, "switch_layers", "QuantizedSwitchLinear")


def is_heads(layer: nn.Module) -> bool:
    """Returns whether a layer is mlx-lm's for several heads."""
    return _is_of_mlx_lm(layer, "mla", "QuantizedMultiLinear")


def is_sharded(layer: nn.Module) -> bool:
    """Returns whether a quantized layer is split over devices, as MLX shards it."""
    sharded = nn.QuantizedAllToShardedLinear, nn.QuantizedShardedToAllLinear
    return isinstance(layer, sharded)


def are_experts_of_ours(layer: Any, invariant: bool) -> bool:
    """Returns whether kernels of ours multiply by a layer's experts here."""
    if not is_our_format(layer) or getattr(layer, "global_scale", None) is not None:
        return False
    scales = dtype_name(layer.scales.dtype)
    known = scales not in DTYPE_BYTES or scales in selection.traits().dtypes
    return known and multiplies_experts(invariant)


def multiplies_experts(invariant: bool) -> bool:
    """Returns whether there are kernels for experts here."""
    if invariant and not selection.active().gather.is_invariant:
        return False
    # Layers in MLX's layout can be converted anywhere: stock MLX reads them too.
    return selection.traits().default_layout == "mlx" or are_kernels_active()


def _is_of_mlx_lm(layer: nn.Module, module: str, name: str) -> bool:
    known = getattr(sys.modules.get(f"mlx_lm.models.{module}"), name, None)
    return known is not None and type(layer) is known


def is_marlin_experts(layer: nn.Module) -> bool:
    """Returns whether a layer is ours for several experts."""
    return type(layer).__name__ == "MarlinSwitchLinear"


def is_marlin_heads(layer: nn.Module) -> bool:
    """Returns whether a layer is ours for several heads."""
    return type(layer).__name__ == "MarlinMultiLinear"


def marlin_experts() -> Any:
    """Returns the class of our layers of experts."""
    # mlx-lm is imported already if one of its layers is here, and not needed otherwise.
    from mlx_marlin.layers.experts import MarlinSwitchLinear

    return MarlinSwitchLinear


def marlin_heads() -> Any:
    """Returns the class of our layers of heads."""
    from mlx_marlin.layers.heads import MarlinMultiLinear

    return MarlinMultiLinear


def is_our_format(layer: nn.Module) -> bool:
    """Returns whether a quantized layer is in a format of ours."""
    known = FORMATS.get((layer.mode, layer.bits))
    if known is None or layer.group_size not in known.group_sizes:
        return False
    k = layer.weight.shape[-1] * 32 // layer.bits
    return bool(k % known.k_multiple(layer.group_size) == 0)
