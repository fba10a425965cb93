"""The layer of several heads of mlx-lm's latent attention, on our kernels."""

from dataclasses import replace
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.mla import QuantizedMultiLinear

from mlx_marlin.layers.batch import BatchLayer, as_batch
from mlx_marlin.layers.native import PACKED, native_weight
from mlx_marlin.products.linear import layer_product
from mlx_marlin.weights.packed_weight import PackedWeight


class MarlinMultiLinear(BatchLayer, QuantizedMultiLinear):
    """A quantized layer of several heads whose products run on our kernels.

    It is a `QuantizedMultiLinear`. With `layout="mlx"` it has the same parameters, and
    stock MLX serves the products with weights that are not transposed, which latent
    attention needs for prompts. With `layout="marlin"` its parameters are `words` and
    `packed_scales`; for products that are not transposed, our kernel decodes the
    weights and MLX multiplies by them.

    Products that are not transposed make keys of latents: they are part of attention,
    which is MLX's also in an invariant model.
    """

    stock = QuantizedMultiLinear

    @classmethod
    def from_packed(cls, packed: PackedWeight) -> Self:
        """Returns a layer with a batch of packed weights, in any of our formats.

        `packed`: the weights [heads, n, k], without a global scale.
        """
        return cls._of_packed(as_batch(packed, "heads"))

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        """Returns the products of the heads' rows.

        `x`: rows [..., heads or 1, rows, k], or [..., n] if not transposed.
        """
        invariant = self.invariant and transpose
        weight = self.packed or native_weight(self)
        return layer_product(x, weight, transpose=transpose, invariant=invariant)

    # nn.Module overrides dict.update with another signature.
    def update(  # type: ignore[override]
        self, parameters: dict[str, Any], strict: bool = True
    ) -> Self:
        """Replaces parameters, as `nn.Module.update` does.

        If all packed parameters are replaced together, their number of heads may
        change, as it does when mlx-lm's models divide heads among machines.
        """
        packed, words, scales = self.packed, *(parameters.get(name) for name in PACKED)
        if packed is None or words is None or scales is None:
            super().update(parameters, strict)
        else:
            replace(packed, words=words, scales=scales)  # which checks them
            dict.update(self, words=words, packed_scales=scales)
        return self
