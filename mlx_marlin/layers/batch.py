"""The base of our layers with a batch of weights: experts and heads."""

from typing import Any, Self, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.layers.guarded_parameters import GuardedParameters
from mlx_marlin.layers.native import NATIVE, PACKED, replace_entries
from mlx_marlin.products.packing import pack, unpack
from mlx_marlin.products.reference.weight import as_mlx, stock_group_size
from mlx_marlin.weights.formats import MODE_DEFAULTS
from mlx_marlin.weights.packed_weight import PackedWeight

Layer = TypeVar("Layer", bound=nn.Module)


class BatchLayer(GuardedParameters):
    """The parameters of a quantized layer with several weights, in either layout.

    With `layout="mlx"` they are mlx-lm's own. With `layout="marlin"` they are `words`
    and `packed_scales`; reading `weight`, `scales` or `biases` unpacks them.

    Attributes:
        layout: "mlx" or "marlin".
    """

    stock: type[nn.Module]
    """mlx-lm's class."""
    invariant: bool = False
    _n: int
    _k: int
    _stock: type[nn.Module] | None = None
    """The class of another package that the layer comes from."""

    @classmethod
    def from_quantized(
        cls, layer: Any, *, layout: str = "mlx", invariant: bool = False
    ) -> Self:
        """Returns a layer with the parameters of mlx-lm's, or of another package's.

        Args:
            layer: The layer, which is not changed.
            layout: "mlx" shares the layer's arrays; "marlin" packs them.
            invariant: Whether a row's bits must not depend on the other rows.
        """
        is_marlin = isinstance(layer, cls)
        keeps_packed = is_marlin and layout == layer.layout == "marlin"
        given = layer.to_stock() if is_marlin and not keeps_packed else layer
        result = converted(cls, given)
        if not isinstance(given, cls) and type(given) is not cls.stock:
            result._stock = type(given)
        result.invariant = invariant
        if layout == "marlin" and not keeps_packed:
            result.keep_packed()
        return result

    def _features(self) -> tuple[int, int]:
        return self._n, self._k

    @property
    def weight(self) -> mx.array:
        """Codes in MLX's layout, uint32 [weights, n, k * bits / 32]."""
        return self.native()[0]

    @property
    def scales(self) -> mx.array:
        """Scales [weights, n, k / group_size]."""
        return self.native()[1]

    @property
    def biases(self) -> mx.array | None:
        """Biases [weights, n, k / group_size]; None if the mode has none."""
        return self.native()[2]

    @biases.setter
    def biases(self, none: mx.array | None) -> None:
        """Accepts the None that mlx-lm's layers set if the mode has no biases."""

    def native(self) -> tuple[mx.array, mx.array, mx.array | None]:
        """Returns codes, scales and biases, or None for biases, in MLX's layout."""
        packed = self.packed
        if packed is None:
            return self["weight"], self["scales"], self.get("biases")
        words, scales, *biases = unpack(packed)
        return words, scales, biases[0] if biases else None

    def keep_packed(self) -> None:
        """Packs the layer's arrays, which are in MLX's layout, in place."""
        packed = pack(
            *self.native(), group_size=self.group_size, bits=self.bits, mode=self.mode
        )
        arrays = dict(zip(PACKED, (packed.words, packed.scales), strict=True))
        replace_entries(self, NATIVE, arrays)
        self._mark_packed(packed)

    def _mark_packed(self, packed: PackedWeight) -> None:
        """Sets what the layer says about its packed arrays."""
        self._n, self._k = packed.n, packed.k
        self.layout = "marlin"
        self.freeze(keys=[*PACKED])

    def to_stock(self) -> Any:
        """Returns mlx-lm's own layer with the same parameters, in MLX's layout.

        If the layer comes from another package's, it is of that class.

        A zero point becomes a bias, rounded to the scales' dtype.

        Raises:
            ValueError: If MLX has no such group size.
        """
        layer: Any = converted(self._stock or self.stock, self)
        for name in ("layout", "invariant", "_n", "_k", "_stock"):
            vars(layer).pop(name, None)
        layer._no_grad.difference_update(PACKED)
        native = dict(zip(NATIVE, self.native(), strict=True))
        packed = self.packed
        if packed is not None and self.mode not in MODE_DEFAULTS:
            size = stock_group_size(packed)
            if size is None:
                raise ValueError(f"MLX has no experts in groups of {self.group_size}")
            layer.group_size, layer.mode = size, "affine"
            native = dict(zip(NATIVE, as_mlx(packed), strict=True))
        if self.layout == "marlin":
            arrays = {
                name: array for name, array in native.items() if array is not None
            }
            replace_entries(layer, PACKED, arrays)
        for name, array in native.items():
            setattr(layer, name, array)
        return layer


def converted(cls: type[Layer], layer: Any) -> Layer:
    """Returns a layer of a class with the arrays and the state of another layer."""
    result = cls.__new__(cls)
    vars(result).update(layer.__getstate__())
    result._no_grad = set(layer._no_grad)
    dict.update(result, layer)
    return result
