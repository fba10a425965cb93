"""The base of our layers with a batch of weights: experts and heads."""

from typing import Any, Self

import mlx.nn as nn

from mlx_marlin.layers.guarded_parameters import GuardedParameters
from mlx_marlin.layers.native import GLOBAL_SCALE
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
