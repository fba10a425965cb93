"""The parameters of a quantized linear layer, in MLX's layout or packed."""

from typing import NoReturn

import mlx.core as mx

from mlx_marlin.layers.guarded_parameters import GuardedParameters
from mlx_marlin.layers.native import GLOBAL_SCALE, NATIVE, PACKED
from mlx_marlin.products.packing import pack, quantize, unpack
from mlx_marlin.weights.packed_weight import GroupSize, PackedWeight


class LinearParameters(GuardedParameters):
    """The parameters of an `nn.QuantizedLinear`, in either layout.

    With `layout="mlx"` they are MLX's own. With `layout="marlin"` they are `words` and
    `packed_scales`, and `global_scale` if the weight has one; reading `weight`,
    `scales` or `biases` unpacks them.
    """

    input_dims: int
    output_dims: int

    def _features(self) -> tuple[int, int]:
        return self.output_dims, self.input_dims

    # In MLX's layer these are plain attributes, which are set once.
    @property
    def weight(self) -> mx.array:
        """Codes in MLX's layout, uint32 [n, k * bits / 32]."""
        return self.native()[0]

    @weight.deleter
    def weight(self) -> None:
        _refuse_change("weight")

    @property
    def scales(self) -> mx.array:
        """Scales [n, k / group_size].

        Raises:
            ValueError: If the weight has a global scale, without which they are wrong.
        """
        if GLOBAL_SCALE in self:
            raise ValueError(
                f"scales of a {type(self).__name__} with a global scale do not give "
                f"its weight: use mlx_marlin.dequantize(layer.packed)"
            )
        return self.native()[1]

    @scales.deleter
    def scales(self) -> None:
        _refuse_change("scales")

    @property
    def biases(self) -> mx.array | None:
        """Biases [n, k / group_size]; None if the mode has none."""
        return self.native()[2]

    @biases.setter
    def biases(self, none: mx.array | None) -> None:
        """Accepts the None that MLX's layer sets if the mode has no biases."""

    @biases.deleter
    def biases(self) -> None:
        _refuse_change("biases")

    def native(self) -> tuple[mx.array, mx.array, mx.array | None]:
        """Returns codes, scales and biases, or None for biases, in MLX's layout.

        A global scale is not among them.
        """
        packed = self.packed
        if packed is not None:
            words, scales, *biases = unpack(packed)
            return words, scales, biases[0] if biases else None
        # While MLX builds the layer, the arrays are missing, like other attributes.
        named = NATIVE if self.mode == "affine" else NATIVE[:2]
        missing = [name for name in named if name not in self]
        if missing:
            raise AttributeError(f"{type(self).__name__} has no {missing[0]!r} yet")
        return self["weight"], self["scales"], self.get("biases")

    def _keep(self, name: str, array: mx.array | None) -> None:
        """Sets an array in MLX's layout, which a property of this class shadows."""
        if array is not None:
            self[name] = array

    def _quantize(
        self, weight: mx.array, group_size: GroupSize, bits: int | None, mode: str
    ) -> None:
        """Quantizes a weight to a format that MLX does not support."""
        packed = quantize(weight, group_size=group_size, bits=bits, mode=mode)
        self.group_size, self.bits, self.mode = packed.group_size, packed.bits, mode
        self._take(packed)

    def keep_packed(self, global_scale: mx.array | None = None) -> None:
        """Packs the layer's arrays, which are in MLX's layout, in place.

        Args:
            global_scale: As in `PackedWeight`.
        """
        packed = pack(
            *self.native(),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            global_scale=global_scale,
        )
        for name in NATIVE:
            self.pop(name, None)
        self._take(packed)

    def _take(self, packed: PackedWeight) -> None:
        self.output_dims, self.input_dims = packed.n, packed.k
        self["words"], self["packed_scales"] = packed.words, packed.scales
        names = [*PACKED]
        if packed.global_scale is not None:
            self[GLOBAL_SCALE] = packed.biases_or_global_scale
            names.append(GLOBAL_SCALE)
        self.layout = "marlin"
        self.freeze(keys=names)


def _refuse_change(name: str) -> NoReturn:
    """Raises the TypeError for setting an array, which in MLX deletes the old one."""
    raise TypeError(
        f"{name} of a layer with layout='marlin' cannot be set, because its parameters "
        f"are {' and '.join(PACKED)}: set {name} of the layer that to_stock() returns "
        f"and make a new one with from_quantized"
    )
