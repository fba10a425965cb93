"""A layer whose rows are those of gate and, after them, of up."""

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.layers.linear import MarlinLinear


def layer_of(
    layout: str = "marlin", n: int = 192, *, bias: bool = False
) -> MarlinLinear:
    """Returns a layer of 128 columns in float16, always with the same weight."""
    mx.random.seed(3)
    linear = nn.Linear(128, n, bias=bias)
    linear.set_dtype(mx.float16)
    return MarlinLinear.from_linear(linear, 64, 4, layout=layout)
