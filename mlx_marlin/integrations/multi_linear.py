"""The heads' layers of mlx-lm's latent attention, on our kernels."""

from typing import Self

import mlx.core as mx
from mlx_lm.models.mla import QuantizedMultiLinear

from mlx_marlin.integrations.switch_layers import twin_of
from mlx_marlin.ops import quantized_matmul


class MarlinMultiLinear(QuantizedMultiLinear):
    """A quantized layer of several heads whose products run on our kernels.

    It is a `QuantizedMultiLinear` with the same parameters.
    """

    @classmethod
    def from_quantized(cls, layer: QuantizedMultiLinear) -> Self:
        """Makes a layer that shares the arrays of mlx-lm's."""
        return twin_of(cls, layer)

    def to_stock(self) -> QuantizedMultiLinear:
        """Returns mlx-lm's own layer with the same arrays."""
        return twin_of(QuantizedMultiLinear, self)

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        """Returns the product of each head's rows, x [..., heads, rows, k]."""
        return quantized_matmul(
            x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            transpose,
            self.group_size,
            self.bits,
            self.mode,
        )
