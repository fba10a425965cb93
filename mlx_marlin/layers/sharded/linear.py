"""Sharded linear layers on our kernels: a product, and MLX's communication.

They are of the classes of MLX that `model.shard` and `shard_linear` create, before
`optimize`. Each machine plans for its own part of the weight.
"""

from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import sum_gradients

from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.layers.native import NATIVE, without_parameters


class _ShardedLinear(MarlinLinear):
    """A machine's part of a linear layer.

    Attributes:
        group: The machines that share the layer.
    """

    stock: type[nn.Module]
    """MLX's class."""

    @classmethod
    def from_quantized(
        cls, layer: Any, *, layout: str = "mlx", invariant: bool = False
    ) -> Self:
        """Returns a layer with the parameters of a sharded layer.

        Args:
            layer: MLX's sharded layer, or one of this class; it is not changed.
            layout: "mlx" shares the layer's arrays; "marlin" packs them.
            invariant: Whether a row's bits must not depend on the number of rows.

        Raises:
            TypeError: If the layer is of another class.
            ValueError: If the layout is unknown or does not support the format.
        """
        if not isinstance(layer, cls | cls.stock):
            raise TypeError(
                f"layer must be an nn.{cls.stock.__name__}, got {type(layer).__name__}"
            )
        part = layer if isinstance(layer, cls) else _copied(nn.QuantizedLinear, layer)
        result = super().from_quantized(part, layout=layout, invariant=invariant)
        result.group = layer.group
        return result

    def to_stock(self) -> Any:
        """Returns MLX's own layer with the same parameters, in MLX's layout."""
        layer = _copied(self.stock, super().to_stock())
        layer.group = self.group
        return layer

    def _extra_repr(self) -> str:
        return f"{super()._extra_repr()}, one part of {self.group.size()}"


class MarlinAllToShardedLinear(_ShardedLinear):
    """Computes a part of the features: each machine holds rows of the weight."""

    stock = nn.QuantizedAllToShardedLinear

    def __call__(self, x: mx.array) -> mx.array:
        """Returns this machine's features [..., n / machines] of x [..., k]."""
        return super().__call__(sum_gradients(self.group)(x))


class MarlinShardedToAllLinear(_ShardedLinear):
    """Adds the machines' products: each holds columns of the weight."""

    stock = nn.QuantizedShardedToAllLinear

    def __call__(self, x: mx.array) -> mx.array:
        """Returns all features [..., n] of this machine's x [..., k / machines]."""
        y = mx.distributed.all_sum(self._product(x, None), group=self.group)
        # Every machine has the whole bias, which is to be added once.
        return y + self["bias"] if "bias" in self else y


SHARDED = (MarlinAllToShardedLinear, MarlinShardedToAllLinear)


def class_for(layer: nn.Module) -> type[_ShardedLinear]:
    """Returns the class for one of MLX's sharded layers, or of one of ours."""
    return next(cls for cls in SHARDED if isinstance(layer, cls | cls.stock))


def _copied(cls: type[nn.Module], layer: Any) -> Any:
    """Returns a layer of another class with a layer's parameters, in their order."""
    result: Any = without_parameters(cls, layer)
    for name in NATIVE:
        setattr(result, name, layer.get(name))  # MLX's have None for no biases
    if "bias" in layer:
        result["bias"] = layer["bias"]
    return result
