"""Products and copies of layers whose arrays are in MLX's layout."""

from collections.abc import Sequence
from typing import TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_marlin.products.linear import linear
from mlx_marlin.products.matmul import quantized_matmul
from mlx_marlin.products.reference.weight import NativeWeight
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES

NATIVE = ("weight", "scales", "biases")
"""A layer's arrays in MLX's layout."""
PACKED = ("words", "packed_scales")
"""A layer's arrays in the packed layout."""
GLOBAL_SCALE = "global_scale"
"""An array of a packed linear layer: its global scale, float32 [2].

It occurs twice: MLX passes arrays of less than 8 bytes in another address space.
"""

Layer = TypeVar("Layer", bound=nn.Module)


def native_product(
    layer: nn.Module,
    x: mx.array,
    bias: mx.array | None,
    invariant: bool,
    residual: mx.array | None = None,
) -> mx.array:
    """Multiplies x [..., k] by a layer's weight [n, k] in MLX's layout.

    Args:
        layer: The layer.
        x: Activations.
        bias: Bias [n] to add.
        invariant: As for `linear`.
        residual: Summands [..., n].
    """
    w, scales, biases, (group_size, bits, mode) = native_weight(layer)
    if bias is None and residual is None and not invariant:
        return quantized_matmul(x, w, scales, biases, True, group_size, bits, mode)
    return linear(
        x,
        w,
        scales,
        biases,
        bias=bias,
        residual=residual,
        invariant=invariant,
        group_size=group_size,
        bits=bits,
        mode=mode,
    )


def stock_product(layer: nn.Module, x: mx.array) -> mx.array:
    """Returns the result of `nn.QuantizedLinear` for a layer in MLX's layout."""
    y: mx.array = mx.quantized_matmul(
        x,
        layer["weight"],
        scales=layer["scales"],
        biases=layer.get("biases"),
        transpose=True,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )
    return y + layer["bias"] if "bias" in layer else y


def native_weight(layer: nn.Module) -> NativeWeight:
    """Returns the weight of a layer in MLX's layout."""
    format = layer.group_size, layer.bits, layer.mode
    return layer["weight"], layer["scales"], layer.get("biases"), format


def without_parameters(cls: type[Layer], layer: nn.Module) -> Layer:
    """Returns a layer without parameters, in the format and state of another."""
    result = cls.__new__(cls)
    nn.Module.__init__(result)
    result.group_size, result.bits, result.mode = (
        layer.group_size,
        layer.bits,
        layer.mode,
    )
    result.train(layer.training)
    result._no_grad = set(layer._no_grad).difference(PACKED, (GLOBAL_SCALE,))
    return result


def activation_dtype(model: nn.Module) -> mx.Dtype:
    """Returns the dtype of the activations of layers whose scales are bytes.

    It is the dtype of the model's first floating-point parameter, such as a norm's
    weight. Without one it is bfloat16, to which MLX decodes such weights.
    """
    named = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    dtypes = (parameter.dtype for _, parameter in named)
    floats = (dtype for dtype in dtypes if dtype_name(dtype) in DTYPE_BYTES)
    return next(floats, mx.bfloat16)


def replace_entries(
    layer: nn.Module, names: Sequence[str], arrays: dict[str, mx.array]
) -> None:
    """Replaces the entries of these names, at the position of the first of them.

    The parameters thus keep their order when they are packed and unpacked.
    """
    entries = [*dict.items(layer)]
    layer.clear()
    for name, value in entries:
        if name == names[0]:
            dict.update(layer, arrays)
        elif name not in names:
            dict.update(layer, {name: value})
