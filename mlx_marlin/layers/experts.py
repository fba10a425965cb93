"""Layers with a batch of weights: mixtures of experts, heads of latent attention."""

from dataclasses import replace
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_marlin.layers.guarded_parameters import (
    GLOBAL_SCALE,
    PACKED,
    GuardedParameters,
    native_weight,
)
from mlx_marlin.products.experts import gather_native, gather_packed
from mlx_marlin.products.linear import layer_product
from mlx_marlin.weights.packed_weight import PackedWeight


class BatchLayer(GuardedParameters):
    """The parameters of a quantized layer with several weights, in either layout.

    With `layout="mlx"` they are mlx-lm's own. With `layout="marlin"` they are `words`
    and `packed_scales`; reading `weight`, `scales` or `biases` unpacks them.
    """

    stock: type[nn.Module]
    """mlx-lm's class."""
    _stock: type[nn.Module] | None = None
    """The class of another package that the layer comes from."""

    @classmethod
    def from_quantized(
        cls, layer: Any, *, layout: str = "mlx", invariant: bool = False
    ) -> Self:
        """Returns a layer with the parameters of mlx-lm's, or of another package's."""
        is_marlin = isinstance(layer, cls)
        keeps_packed = is_marlin and layout == layer.layout == "marlin"
        given = layer.to_stock() if is_marlin and not keeps_packed else layer
        result = cls.__new__(cls)
        vars(result).update(given.__getstate__())
        result._no_grad = set(given._no_grad)
        dict.update(result, given)
        if not isinstance(given, cls) and type(given) is not cls.stock:
            result._stock = type(given)
        result.invariant = invariant
        if layout == "marlin" and not keeps_packed:
            result.keep_packed()
        return result

    def to_stock(self) -> Any:
        """Returns mlx-lm's own layer with the same parameters, in MLX's layout.

        If the layer comes from another package's, it is of that class.

        A zero point becomes a bias, rounded to the scales' dtype.
        """
        layer = self._in_mlxs_layout(self._stock or self.stock)
        if layer is None:
            raise ValueError(f"MLX has no experts in groups of {self.group_size}")
        if vars(self).get(GLOBAL_SCALE, ()) is None:
            layer.global_scale = None
        return layer


def as_batch(packed: PackedWeight, axis: str) -> PackedWeight:
    """Returns packed weights [..., n, k], if they are one batch without a global
    scale."""
    if len(packed.batch) != 1 or packed.global_scale is not None:
        raise ValueError(
            f"packed has batch={packed.batch} and global_scale="
            f"{packed.global_scale}, expected ({axis},) without a global scale"
        )
    return packed


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
