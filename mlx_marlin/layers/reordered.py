"""`ReorderedLinear`, a layer whose columns are not in the order of x."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.layers.refused_uses import SHARDED, RefusingModule


class ReorderedLinear(RefusingModule):
    """A linear layer or layer of experts that gathers features before its product.

    GPTQ with act-order quantizes the columns of a weight in the order of their
    importance, and its groups are runs of columns only in that order.

    `input_order`: int32 [k], a permutation: column i multiplies feature
    `input_order[i]` of x.
    """

    def __init__(self, linear: Any, input_order: mx.array) -> None:
        nn.Module.__init__(self)
        features = mx.arange(linear.input_dims, dtype=mx.int32)
        if not mx.array_equal(mx.sort(input_order), features):
            raise ValueError(
                f"input_order of shape {input_order.shape}, expected a permutation of "
                f"{linear.input_dims} features"
            )
        self.linear = linear
        self.input_order = input_order.astype(mx.int32)
        self.freeze()

    def __call__(self, x: mx.array, *args: Any, **options: Any) -> mx.array:
        """Returns the product [..., n] of x [..., k], plus the bias if any."""
        own = mx.take(x, self["input_order"], axis=-1)
        y: mx.array = self.linear(own, *args, **options)
        return y

    def why_not(self, use: str) -> str | None:
        """Returns why the layer is not sharded; it may be saved."""
        if use != SHARDED:
            return None
        return (
            "ReorderedLinear cannot be sharded, because its columns are in another "
            "order than the features of x: use a checkpoint without act-order, or "
            "one machine"
        )
