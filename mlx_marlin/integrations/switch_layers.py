"""The experts' layers of mlx-lm, on our kernels."""

from typing import Any, Self, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_marlin.gather import gather_qmm

Layer = TypeVar("Layer", bound=nn.Module)


class MarlinSwitchLinear(QuantizedSwitchLinear):
    """A quantized layer of several experts whose products run on our kernels.

    It is a `QuantizedSwitchLinear` with the same parameters.
    """

    @classmethod
    def from_quantized(cls, layer: QuantizedSwitchLinear) -> Self:
        """Makes a layer that shares the arrays of mlx-lm's."""
        return twin_of(cls, layer)

    def to_stock(self) -> QuantizedSwitchLinear:
        """Returns mlx-lm's own layer with the same arrays."""
        return twin_of(QuantizedSwitchLinear, self)

    def __call__(
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        """Returns the product of each row of x with the experts that it chose."""
        y = gather_qmm(
            x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            None,
            indices,
            True,
            self.group_size,
            self.bits,
            self.mode,
            self.get("global_scale"),
            sorted_indices=sorted_indices,
        )
        if "bias" in self:
            y = y + mx.expand_dims(self["bias"][indices], -2)
        return y


def twin_of(cls: type[Layer], layer: Any) -> Layer:
    """Makes a layer of a class with the arrays and the state of another layer."""
    twin = cls.__new__(cls)
    vars(twin).update(vars(layer))
    twin._no_grad = set(layer._no_grad)
    dict.update(twin, layer)
    return twin
