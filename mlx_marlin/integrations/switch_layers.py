"""The experts' layers of mlx-lm, on our kernels."""

from typing import Any, Self, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_marlin.gather import gather_packed, gather_qmm
from mlx_marlin.nn import NATIVE, PACKED
from mlx_marlin.packing import PackedWeight, pack, unpack

Layer = TypeVar("Layer", bound=nn.Module)


class MarlinSwitchLinear(QuantizedSwitchLinear):
    """A quantized layer of several experts whose products run on our kernels.

    It is a `QuantizedSwitchLinear`. With `layout="mlx"` it has the same parameters;
    with `layout="marlin"` its parameters are `words` and `quantizers`, and `weight`,
    `scales` and `biases` are unpacked when something asks for them.

    Attributes:
        layout: "mlx" or "marlin".
        invariant: Whether a row's bits must not depend on the other rows.
    """

    layout: str = "mlx"
    invariant: bool = False

    @classmethod
    def from_quantized(
        cls,
        layer: QuantizedSwitchLinear,
        *,
        layout: str = "mlx",
        invariant: bool = False,
    ) -> Self:
        """Makes a layer with the parameters of mlx-lm's.

        Args:
            layer: The layer; it stays as it is.
            layout: "mlx" shares the layer's arrays; "marlin" packs them.
            invariant: Whether a row's bits must not depend on the other rows.
        """
        is_ours = isinstance(layer, MarlinSwitchLinear)
        ours = twin_of(cls, layer.to_stock() if is_ours else layer)
        ours.invariant = invariant
        if layout == "marlin":
            ours._keep_packed()
        return ours

    def to_stock(self) -> QuantizedSwitchLinear:
        """Returns mlx-lm's own layer with the same parameters, in MLX's layout."""
        layer = twin_of(QuantizedSwitchLinear, self)
        for name in ("layout", "invariant", "_n", "_k"):
            vars(layer).pop(name, None)
        for name in PACKED:
            layer.pop(name, None)
        layer._no_grad.difference_update(PACKED)
        for name, array in zip(NATIVE, self._native(), strict=True):
            setattr(layer, name, array)
        return layer

    @property
    def packed(self) -> PackedWeight | None:
        """The packed weights; None with `layout="mlx"`."""
        if self.layout == "mlx":
            return None
        return PackedWeight(
            words=self["words"],
            scales=self["quantizers"],
            n=self._n,
            k=self._k,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )

    @property
    def weight(self) -> mx.array:
        """Codes in MLX's layout, uint32 [experts, n, k * bits / 32]."""
        return self._native()[0]

    @property
    def scales(self) -> mx.array:
        """Scales [experts, n, k / group_size]."""
        return self._native()[1]

    @property
    def biases(self) -> mx.array | None:
        """Biases [experts, n, k / group_size]; None where the mode has none."""
        return self._native()[2]

    @biases.setter
    def biases(self, none: mx.array | None) -> None:
        """Takes the None that mlx-lm's layer sets where the mode has no biases."""

    def __call__(
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        """Returns the product of each row of x with the experts that it chose."""
        if self.layout == "mlx":
            y = gather_qmm(
                x,
                *self._native(),
                None,
                indices,
                True,
                self.group_size,
                self.bits,
                self.mode,
                self.get("global_scale"),
                sorted_indices=sorted_indices,
                invariant=self.invariant,
            )
        else:
            y = gather_packed(
                x,
                self["words"],
                self["quantizers"],
                self._n,
                self._k,
                self.group_size,
                self.bits,
                self.mode,
                None,
                indices,
                sorted_indices=sorted_indices,
                invariant=self.invariant,
            )
        if "bias" in self:
            y = y + mx.expand_dims(self["bias"][indices], -2)
        return y

    def _native(self) -> tuple[mx.array, mx.array, mx.array | None]:
        packed = self.packed
        if packed is None:
            return self["weight"], self["scales"], self.get("biases")
        words, scales, *biases = unpack(packed)
        return words, scales, biases[0] if biases else None

    def _keep_packed(self) -> None:
        native = [self.pop(name, None) for name in NATIVE]
        packed = pack(
            *native, group_size=self.group_size, bits=self.bits, mode=self.mode
        )
        self._n, self._k = packed.n, packed.k
        self["words"], self["quantizers"] = packed.words, packed.scales
        self.layout = "marlin"
        self.freeze(keys=[*PACKED])


def twin_of(cls: type[Layer], layer: Any) -> Layer:
    """Makes a layer of a class with the arrays and the state of another layer."""
    twin = cls.__new__(cls)
    vars(twin).update(vars(layer))
    twin._no_grad = set(layer._no_grad)
    dict.update(twin, layer)
    return twin
