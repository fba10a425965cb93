"""The layer of mixtures of experts, on our kernels."""

from typing import Self

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_marlin.layers.batch import BatchLayer, as_batch
from mlx_marlin.layers.native import native_weight
from mlx_marlin.products.experts import gather_native, gather_packed
from mlx_marlin.weights.packed_weight import PackedWeight


class MarlinSwitchLinear(BatchLayer, QuantizedSwitchLinear):
    """A quantized layer of several experts whose products run on our kernels.

    It is a `QuantizedSwitchLinear`. With `layout="mlx"` it has the same parameters.
    With `layout="marlin"` its parameters are `words` and `packed_scales`; reading
    `weight`, `scales` or `biases` unpacks them.
    """

    stock = QuantizedSwitchLinear

    @classmethod
    def from_packed(cls, packed: PackedWeight, bias: mx.array | None = None) -> Self:
        """Returns a layer with a batch of packed weights, in any of our formats.

        `packed`: the weights [experts, n, k], without a global scale.
        `bias`: biases [experts, n], or None.
        """
        as_batch(packed, "experts")
        if bias is not None and bias.shape != (*packed.batch, packed.n):
            raise ValueError(
                f"bias has shape {bias.shape}, expected {(*packed.batch, packed.n)}"
            )
        result = cls._of_packed(packed)
        result.global_scale = None
        if bias is not None:
            result["bias"] = bias
        return result

    def __call__(
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        """Returns the products of rows of x with the experts that indices select."""
        weight = self.packed
        if weight is not None:
            return gather_packed(
                x,
                weight,
                None,
                indices,
                sorted_indices=sorted_indices,
                invariant=self.invariant,
                bias=self.get("bias"),
            )
        call = x.shape, x.dtype, indices.shape, sorted_indices
        if call == self._last_stock_call or self.is_stock_call(call):
            y: mx.array = mx.gather_qmm(
                x,
                self["weight"],
                self["scales"],
                self.get("biases"),
                rhs_indices=indices,
                transpose=True,
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
                global_scale=self.get("global_scale"),
                sorted_indices=sorted_indices,
            )
            return self._biased(y, indices) if "bias" in self else y
        y, is_stock = gather_native(
            x,
            native_weight(self),
            None,
            indices,
            global_scale=self.get("global_scale"),
            sorted_indices=sorted_indices,
            invariant=self.invariant,
        )
        if is_stock:
            self.remember_stock(call)
        return self._biased(y, indices) if "bias" in self else y

    def _biased(self, y: mx.array, indices: mx.array) -> mx.array:
        return y + mx.expand_dims(self["bias"][indices], -2)
