"""The arrays of layers in MLX's layout and packed, and copies of layers."""

from typing import TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

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
    packed = (*PACKED, GLOBAL_SCALE) if "words" in layer else ()
    result._no_grad = set(layer._no_grad).difference(packed)
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
