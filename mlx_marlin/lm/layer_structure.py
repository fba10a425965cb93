"""Recognizes other packages' layers of experts and heads by what they hold and compute.

mlx-vlm and others have classes of their own that do the same as mlx-lm's.
"""

import importlib.util
import inspect
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.layers.guarded_parameters import GuardedParameters

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
