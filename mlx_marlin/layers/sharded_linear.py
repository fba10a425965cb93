"""Sharded linear layers on our kernels: a product, and MLX's communication.

They are of the classes of MLX that `model.shard` and `shard_linear` create, before
`optimize`. Each machine plans for its own part of the weight.
"""

from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import sum_gradients

from mlx_marlin.layers.linear import MarlinLinear


class _ShardedLinear(MarlinLinear):
    """A machine's part of a linear layer."""

    @classmethod
    def from_quantized(
        cls, layer: Any, *, layout: str = "mlx", invariant: bool = False
    ) -> Self:
        """Returns a layer with the parameters of a sharded layer.

        The arguments and errors are those of `MarlinLinear`.
        """
        result = super().from_quantized(layer, layout=layout, invariant=invariant)
        result.group = layer.group
        return result

    def to_stock(self) -> Any:
        """Returns MLX's own layer with the same parameters, in MLX's layout."""
        layer = super().to_stock()
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
