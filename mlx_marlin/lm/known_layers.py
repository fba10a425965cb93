"""Which layers of mlx-lm and MLX `optimize` knows, and what runs here."""

import importlib.util
import inspect
import sys
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.backends import selection
from mlx_marlin.backends.base import Traits
from mlx_marlin.layers.guarded_parameters import GuardedParameters
from mlx_marlin.planning.block_plans import RoutePlan
from mlx_marlin.products import this_machine
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES, FORMATS

EXPERTS, HEADS = "experts", "heads"
KINDS = {("indices", "sorted_indices"): EXPERTS, ("transpose",): HEADS}
"""Parameters of a class's `__call__` after x -> what its layers may be."""
ARRAYS = {"weight", "scales", "biases", "bias"}
ATTRIBUTES = {"group_size", "bits", "mode", "biases", "_no_grad", "_training"}
COUNT, ROWS = 3, 8
"""Weights of the layer that is tried, and their rows."""


def structure_of(layer: nn.Module) -> str | None:
    """Returns whether a layer is one of "experts" or "heads", or else None.

    It holds quantized weights [weights, n, k * bits / 32] and nothing that mlx-lm's
    layers do not have, and its class returns MLX's own product of small ones.
    """
    weight = layer.get("weight")
    if not isinstance(weight, mx.array) or weight.ndim != 3 or "scales" not in layer:
        return None
    if (
        isinstance(layer, GuardedParameters)
        or importlib.util.find_spec("mlx_lm") is None
    ):
        return None
    if layer.keys() - ARRAYS or vars(layer).keys() - ATTRIBUTES:
        return None
    if weight.dtype != mx.uint32 or layer["scales"].shape[:2] != weight.shape[:2]:
        return None
    call: Any = type(layer).__call__
    format = layer.group_size, layer.bits, layer.mode
    return _computes(type(layer), call, format, "bias" in layer)


@cache
def _computes(
    cls: type[nn.Module], call: Any, format: tuple[int, int, str], biased: bool
) -> str | None:
    """Returns what the layers of a class are, by the results of a small one."""
    try:
        kind = KINDS.get(tuple(inspect.signature(call).parameters)[2:])
        same = kind is not None and _is_stock_product(cls, kind, format, biased)
    except Exception:  # it needs more than such a layer has
        return None
    return kind if same else None


def _is_stock_product(
    cls: type[nn.Module], kind: str, format: tuple[int, int, str], biased: bool
) -> bool:
    """Returns whether a small layer of a class returns MLX's own product."""
    group_size, bits, mode = format
    k = 2 * max(group_size, 64)
    stored = mx.quantize(_values(COUNT, ROWS, k), group_size, bits, mode)
    layer: Any = cls.__new__(cls)
    nn.Module.__init__(layer)
    layer.group_size, layer.bits, layer.mode = format
    layer.weight, layer.scales, *_ = stored
    layer.biases = stored[2] if len(stored) > 2 else None
    if biased:
        layer.bias = _values(COUNT, ROWS)
    sizes: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
    if kind == EXPERTS:
        x, chosen = _values(2, 2, 1, k), mx.array([[0, 2], [2, 1]], mx.uint32)
        y = mx.gather_qmm(x, *stored, rhs_indices=chosen, transpose=True, **sizes)
        y = y + layer.bias[chosen][..., None, :] if biased else y
        return bool(mx.array_equal(layer(x, chosen), y))
    of_k, of_n = _values(COUNT, 2, k), _values(COUNT, 2, ROWS)
    product, back = (
        mx.quantized_matmul(x, *stored, transpose=transpose, **sizes)
        for x, transpose in ((of_k, True), (of_n, False))
    )
    same = mx.array_equal(layer(of_k), product)
    return not biased and bool(same & mx.array_equal(layer(of_n, False), back))


def _values(*shape: int) -> mx.array:
    """Returns an array of different numbers between -1 and 1."""
    size = mx.zeros(shape).size
    return mx.sin(mx.arange(1, size + 1, dtype=mx.float32)).reshape(shape)


def are_kernels_active() -> bool:
    """Returns whether our kernels would serve a call now."""
    if this_machine.device().unsupported is not None:
        return False
    return this_machine.why_not(mx.default_device() == mx.Device(mx.cpu)) is None


def is_packed_faster() -> bool:
    """Returns whether our kernels run here and are faster with packed weights."""
    return selection.traits().default_layout == "marlin" and are_kernels_active()


def is_routing_fused() -> bool:
    """Returns whether kernels choose experts here and add their results."""
    return RoutePlan in selection.traits().launches and are_kernels_active()


def is_tracing_faster() -> bool:
    """Returns whether our kernels run here and replaying graphs is faster."""
    return selection.traits().replays_graphs and are_kernels_active()


def is_experts(layer: nn.Module) -> bool:
    """Returns whether a layer is mlx-lm's layer of several experts, or like it."""
    own = _is_of_mlx_lm(layer, "switch_layers", "QuantizedSwitchLinear")
    return own or structure_of(layer) == EXPERTS


def is_heads(layer: nn.Module) -> bool:
    """Returns whether a layer is mlx-lm's layer of several heads, or like it."""
    own = _is_of_mlx_lm(layer, "mla", "QuantizedMultiLinear")
    return own or structure_of(layer) == HEADS


def is_plain(layer: nn.Module) -> bool:
    """Returns whether a layer of MLX or mlx-lm multiplies by plain weights."""
    return (
        isinstance(layer, nn.Linear | nn.Embedding)
        or _is_of_mlx_lm(layer, "switch_layers", "SwitchLinear")
        or is_plain_heads(layer)
    )


def is_plain_heads(layer: nn.Module) -> bool:
    """Returns whether a layer is mlx-lm's layer of several heads with plain weights."""
    return _is_of_mlx_lm(layer, "mla", "MultiLinear")


def is_quantized(layer: nn.Module) -> bool:
    """Returns whether a layer of any class holds codes of weights and their scales."""
    weight = layer.get("weight")
    codes = isinstance(weight, mx.array) and mx.issubdtype(weight.dtype, mx.integer)
    return "scales" in layer or codes


def is_sharded(layer: nn.Module) -> bool:
    """Returns whether a quantized layer is one of MLX's sharded layers."""
    sharded = nn.QuantizedAllToShardedLinear, nn.QuantizedShardedToAllLinear
    return isinstance(layer, sharded)


def are_supported_experts(layer: Any, invariant: bool) -> bool:
    """Returns whether the back end has kernels for a layer of experts."""
    return has_expert_kernels(layer, selection.traits()) and supports_experts(invariant)


def has_expert_kernels(layer: Any, traits: Traits) -> bool:
    """Returns whether a back end with such traits reads a layer of experts."""
    if (
        not is_supported_format(layer)
        or getattr(layer, "global_scale", None) is not None
    ):
        return False
    scales = dtype_name(layer.scales.dtype)
    return scales not in DTYPE_BYTES or scales in traits.dtypes


def supports_experts(invariant: bool) -> bool:
    """Returns whether experts can be converted, and be invariant if requested."""
    if invariant and not selection.traits().keeps_experts_bits:
        return False
    # Layers in MLX's layout can be converted anywhere: stock MLX reads them too.
    return selection.traits().default_layout == "mlx" or are_kernels_active()


def supports_heads(invariant: bool) -> bool:
    """Returns whether layers of several heads can be converted."""
    # Heads keep MLX's layout by default, which only such a back end reads.
    return not invariant or selection.traits().default_layout == "mlx"


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
    from mlx_marlin.layers.experts import MarlinMultiLinear

    return MarlinMultiLinear


def is_supported_format(layer: nn.Module) -> bool:
    """Returns whether our kernels read the format of a quantized layer."""
    return why_not_supported(layer) is None


def why_not_supported(layer: Any) -> str | None:
    """Returns why our kernels do not read the format of a quantized layer."""
    format = FORMATS.get((layer.mode, layer.bits))
    if format is None:
        return f"{layer.mode} {layer.bits}-bit is not one of our formats"
    k = layer.weight.shape[-1] * 32 // layer.bits
    return format.why_not(layer.group_size, k, "mlx")
