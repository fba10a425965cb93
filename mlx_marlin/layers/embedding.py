"""An embedding whose tied output head runs on our kernels."""

from typing import Literal, Self

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.layers.native import NATIVE, native_weight, without_parameters
from mlx_marlin.products.linear import layer_product


class MarlinEmbedding(nn.QuantizedEmbedding):
    """A quantized embedding whose tied output head, `as_linear`, runs on our kernels.

    Its parameters are MLX's own, because the look-up of a row needs MLX's layout.
    """

    layout = "mlx"

    @classmethod
    def from_quantized(
        cls,
        layer: nn.QuantizedEmbedding,
        *,
        layout: Literal["mlx"] = "mlx",
        invariant: bool = False,
    ) -> Self:
        """Returns an embedding that shares the arrays of MLX's layer."""
        result = without_parameters(cls, layer)
        result.invariant = invariant
        result.num_embeddings, result.dims = layer.num_embeddings, layer.dims
        for name in NATIVE:
            if name in layer:
                result[name] = layer[name]
        return result

    def to_stock(self) -> nn.QuantizedEmbedding:
        """Returns MLX's own layer with the same arrays."""
        layer = without_parameters(nn.QuantizedEmbedding, self)
        layer.num_embeddings, layer.dims = self.num_embeddings, self.dims
        for name in NATIVE:
            setattr(layer, name, self.get(name))
        return layer

    def as_linear(self, x: mx.array) -> mx.array:
        """Returns the product [..., num_embeddings] of x [..., dims] and the weight."""
        return layer_product(x, native_weight(self), invariant=self.invariant)
