"""Embeddings whose tied output head runs on our kernels, in MLX's layout or packed."""

from typing import Literal, Self

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.layers.guarded_parameters import (
    NATIVE,
    GuardedParameters,
    native_weight,
    without_parameters,
)
from mlx_marlin.products.linear import layer_product
from mlx_marlin.products.reference.weight import decoded_rows, dequantize
from mlx_marlin.weights.packed_weight import PackedWeight


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


class PackedEmbedding(GuardedParameters):
    """An embedding that holds a packed weight, such as GGUF's Q6_K.

    Looking up a row decodes that row alone. A tied output head, `as_linear`, runs on
    our kernels. Its parameters are `words` and `packed_scales`.
    """

    is_packed_only = True
    """MLX's layout does not have the format."""

    @classmethod
    def from_packed(
        cls, packed: PackedWeight, dtype: mx.Dtype, *, invariant: bool = False
    ) -> Self:
        """Returns an embedding with a packed weight.

        `packed`: the weight [n, k], without a global scale.
        """
        if not isinstance(packed, PackedWeight):
            raise TypeError(
                f"packed must be a PackedWeight, got {type(packed).__name__}"
            )
        if packed.batch or packed.global_scale is not None:
            raise ValueError(
                f"packed has batch={packed.batch} and global_scale="
                f"{packed.global_scale}, expected one weight without a global scale"
            )
        layer = cls._of_packed(packed)
        layer.dtype, layer.invariant = dtype, invariant
        return layer

    @classmethod
    def from_quantized(
        cls, layer: Self, *, layout: Literal["marlin"], invariant: bool
    ) -> Self:
        """Returns an embedding with the arrays of another one."""
        return cls.from_packed(layer.packed, layer.dtype, invariant=invariant)

    @property
    def packed(self) -> PackedWeight:
        """The weight."""
        weight = super().packed
        assert weight is not None
        return weight

    @property
    def num_embeddings(self) -> int:
        """Rows of the weight."""
        return self._n

    @property
    def dims(self) -> int:
        """Columns of the weight."""
        return self._k

    def __call__(self, tokens: mx.array) -> mx.array:
        """Returns the rows [..., dims] of tokens [...]."""
        rows = decoded_rows(self.packed, tokens.flatten())
        return rows.astype(self.dtype).reshape(*tokens.shape, self.dims)

    def as_linear(self, x: mx.array) -> mx.array:
        """Returns the product [..., num_embeddings] of x [..., dims] and the weight."""
        return layer_product(x, self.packed, invariant=self.invariant)

    def to_stock(self) -> nn.Embedding:
        """Returns MLX's layer with the decoded weight, rounded to `dtype`."""
        layer = nn.Embedding.__new__(nn.Embedding)
        nn.Module.__init__(layer)
        layer.train(self.training)
        layer.weight = dequantize(self.packed, self.dtype)
        return layer

    def _extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.dims}, group_size={self.group_size}, "
            f"bits={self.bits}, mode={self.mode}"
        )
