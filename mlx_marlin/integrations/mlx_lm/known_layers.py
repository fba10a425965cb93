"""Recognizes the layers of MLX, mlx-lm and this package in a model.

This module does not import mlx-lm, which models without its layers do not need.
"""

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.backends import selection
from mlx_marlin.products import eligibility
from mlx_marlin.weights.formats import FORMATS


def runs_on_cuda() -> bool:
    """Returns whether our CUDA kernels would serve a call now."""
    if selection.backend() != "cuda" or eligibility.unsupported_device() is not None:
        return False
    return eligibility.not_here(mx.default_device() == mx.Device(mx.cpu)) is None


def is_experts(layer: nn.Module) -> bool:
    """Returns whether a layer is mlx-lm's layer of several experts."""
    return _is_of_mlx_lm(layer, "switch_layers", "QuantizedSwitchLinear")


def is_heads(layer: nn.Module) -> bool:
    """Returns whether a layer is mlx-lm's layer of several heads."""
    return _is_of_mlx_lm(layer, "mla", "QuantizedMultiLinear")


def is_sharded(layer: nn.Module) -> bool:
    """Returns whether a quantized layer is one of MLX's sharded layers."""
    sharded = nn.QuantizedAllToShardedLinear, nn.QuantizedShardedToAllLinear
    return isinstance(layer, sharded)


def are_supported_experts(layer: Any, invariant: bool) -> bool:
    """Returns whether the back end has kernels for a layer of experts."""
    if (
        not is_supported_format(layer)
        or getattr(layer, "global_scale", None) is not None
    ):
        return False
    in_float32 = layer.scales.dtype == mx.float32 and selection.backend() == "cuda"
    return supports_experts(invariant) and not in_float32


def supports_experts(invariant: bool) -> bool:
    """Returns whether the back end has kernels for experts."""
    return selection.backend() != "cuda" or (runs_on_cuda() and not invariant)


def _is_of_mlx_lm(layer: nn.Module, module: str, name: str) -> bool:
    cls = getattr(sys.modules.get(f"mlx_lm.models.{module}"), name, None)
    return cls is not None and type(layer) is cls


def is_marlin_experts(layer: nn.Module) -> bool:
    """Returns whether a layer is a `MarlinSwitchLinear`."""
    return type(layer).__name__ == "MarlinSwitchLinear"


def is_marlin_heads(layer: nn.Module) -> bool:
    """Returns whether a layer is a `MarlinMultiLinear`."""
    return type(layer).__name__ == "MarlinMultiLinear"


def marlin_experts() -> Any:
    """Returns `MarlinSwitchLinear`, whose module imports mlx-lm."""
    from mlx_marlin.layers.experts import MarlinSwitchLinear

    return MarlinSwitchLinear


def marlin_heads() -> Any:
    """Returns `MarlinMultiLinear`, whose module imports mlx-lm."""
    from mlx_marlin.layers.heads import MarlinMultiLinear

    return MarlinMultiLinear


def is_supported_format(layer: nn.Module) -> bool:
    """Returns whether our kernels read the format of a quantized layer."""
    format = FORMATS.get((layer.mode, layer.bits))
    if format is None or layer.group_size not in format.group_sizes:
        return False
    k = layer.weight.shape[-1] * 32 // layer.bits
    return bool(k % format.k_multiple(layer.group_size) == 0)
