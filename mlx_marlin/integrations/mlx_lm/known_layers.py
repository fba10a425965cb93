"""Which of a model's layers are mlx-lm's or ours, and where kernels multiply them.

Nothing here imports mlx-lm, which a model without its layers does not need.
"""

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.backends import selection
from mlx_marlin.products import eligibility
from mlx_marlin.weights.formats import FORMATS


def runs_on_cuda() -> bool:
    """Returns whether a call now would run on our CUDA kernels."""
    if selection.backend() != "cuda" or eligibility.unsupported_device() is not None:
        return False
    return eligibility.not_here(mx.default_device() == mx.Device(mx.cpu)) is None


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
    in_float32 = layer.scales.dtype == mx.float32 and selection.backend() == "cuda"
    return multiplies_experts(invariant) and not in_float32


def multiplies_experts(invariant: bool) -> bool:
    """Returns whether there are kernels for experts here."""
    return selection.backend() != "cuda" or (runs_on_cuda() and not invariant)


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
