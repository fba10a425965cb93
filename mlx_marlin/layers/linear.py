"""`MarlinLinear`, a quantized linear layer on our kernels."""

from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import sum_gradients

from mlx_marlin.argument_types import check_format, check_integers
from mlx_marlin.layers.fused_products import FusedProducts
from mlx_marlin.layers.guarded_parameters import (
    GLOBAL_SCALE,
    NATIVE,
    without_parameters,
)
from mlx_marlin.products.linear import layer_product
from mlx_marlin.products.packing import quantize
from mlx_marlin.products.reference.weight import dequantize
from mlx_marlin.weights.formats import DTYPE_BYTES, LAYOUTS, MODE_DEFAULTS, format_of
from mlx_marlin.weights.packed_weight import GroupSize, PackedWeight

FEW_ROWS = 8
"""Rows up to which a layer remembers a call by the number of rows alone."""


class MarlinLinear(FusedProducts, nn.QuantizedLinear):
    """A quantized linear layer whose product runs on our kernels.

    It is an `nn.QuantizedLinear`. With `layout="mlx"` it has the same parameters. With
    `layout="marlin"` its parameters are `words` and `packed_scales`; reading `weight`,
    `scales` or `biases` unpacks them. A packed weight may have a global scale, which is
    the parameter `global_scale`.

    Args:
        input_dims (int): Features that go in, k.
        output_dims (int): Features that come out, n.
        bias (bool): Whether to add a bias. Default: True.
        group_size (int, optional): Weights that share a scale; with `layout="marlin"`
            also sizes that MLX does not support, and "channel". Default: the mode's.
        bits (int, optional): Bits of a code. Default: the mode's.
        mode (str): Quantization scheme. Default: "affine".
        layout (str): "mlx" for MLX's own layout, or "marlin" for the packed layout of
            our kernels. Default: "mlx".
        invariant (bool): Whether a row's bits must not depend on the number of rows, as
            for `linear`. Default: False.
    """

    stock: type[Any] = nn.QuantizedLinear
    """MLX's class."""

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        bias: bool = True,
        group_size: Any = None,
        bits: Any = None,
        mode: str = "affine",
        *,
        layout: str = "mlx",
        invariant: bool = False,
    ) -> None:
        check_integers(input_dims=input_dims, output_dims=output_dims)
        _check(layout, mode, bits, group_size)
        if layout == "mlx":
            super().__init__(input_dims, output_dims, bias, group_size, bits, mode)
        else:
            nn.Module.__init__(self)
            w = nn.Linear(input_dims, output_dims, False).weight
            self._take(quantize(w, group_size=group_size, bits=bits, mode=mode))
            if bias:
                self["bias"] = mx.zeros((output_dims,))
            self.freeze()
        self.invariant = invariant

    @classmethod
    def from_linear(
        cls,
        linear_layer: nn.Module,
        group_size: Any = None,
        bits: Any = None,
        mode: str = "affine",
        *,
        layout: str = "mlx",
        invariant: bool = False,
    ) -> Self:
        """Quantizes an `nn.Linear`, as `nn.QuantizedLinear.from_linear` does."""
        _check_layer("linear_layer", linear_layer, nn.Linear)
        _check(layout, mode, bits, group_size)
        if layout == "mlx":
            stock = nn.QuantizedLinear.from_linear(linear_layer, group_size, bits, mode)
            return cls.from_quantized(stock, invariant=invariant)
        w = linear_layer.weight
        packed = quantize(w, group_size=group_size, bits=bits, mode=mode)
        return cls.from_packed(packed, linear_layer.get("bias"), invariant=invariant)

    @classmethod
    def from_quantized(
        cls,
        layer: nn.QuantizedLinear,
        *,
        layout: str = "mlx",
        invariant: bool = False,
    ) -> Self:
        """Returns a layer with the parameters of an `nn.QuantizedLinear`.

        Args:
            layer: The layer, which is not changed.
            layout: "mlx" shares the layer's arrays; "marlin" packs them.
            invariant: Whether a row's bits must not depend on the number of rows.

        Raises:
            TypeError: If the layer is of another class than `stock`.
            ValueError: If the layout is unknown or does not support the format.
        """
        _check_layer("layer", layer, cls.stock, cls)
        is_packed = isinstance(layer, MarlinLinear) and layer.layout == "marlin"
        packed = layer.packed if is_packed and layout == "marlin" else None
        if packed is None:
            _check(layout, layer.mode, layer.bits)
            sizes = format_of(layer.mode, layer.bits).group_sizes
            if layout == "mlx" and layer.group_size not in sizes:
                raise ValueError(
                    f"layout='mlx' has groups of {sizes}, and the layer has "
                    f"group_size={layer.group_size}"
                )
        result = without_parameters(cls, layer)
        result.invariant = invariant
        for name in NATIVE if packed is None else ():
            setattr(result, name, getattr(layer, name, None))
        if "bias" in layer:
            result["bias"] = layer["bias"]
        if packed is not None:
            result._take(packed)
        elif layout == "marlin":
            result.keep_packed()
        return result

    @classmethod
    def from_packed(
        cls,
        packed: PackedWeight,
        bias: mx.array | None = None,
        *,
        invariant: bool = False,
    ) -> Self:
        """Returns a layer with a packed weight, which may have any of our formats.

        Args:
            packed: The weight [n, k].
            bias: Bias [n], or None.
            invariant: Whether a row's bits must not depend on the number of rows.

        Raises:
            TypeError: If `packed` is not a `PackedWeight`.
            ValueError: If it is a batch, or the bias has another shape.
        """
        if not isinstance(packed, PackedWeight):
            raise TypeError(
                f"packed must be a PackedWeight, got {type(packed).__name__}"
            )
        if packed.batch:
            raise ValueError(f"packed has batch={packed.batch}, expected one weight")
        if bias is not None and bias.shape != (packed.n,):
            raise ValueError(f"bias has shape {bias.shape}, expected {(packed.n,)}")
        result = cls._of_packed(packed)
        result.invariant = invariant
        if bias is not None:
            result["bias"] = bias
        return result

    def to_stock(self) -> nn.QuantizedLinear | nn.Linear:
        """Returns MLX's own layer with the same parameters, in MLX's layout.

        Groups that are longer than MLX's are split. MLX does not support groups of 16
        integers, codebooks and global scales of linear layers: such a layer becomes an
        `nn.Linear` with the decoded weight, with a global scale in bfloat16. A zero
        point becomes a bias, rounded to the scales' dtype. K-quants become float32,
        exactly, and their results are float32.
        """
        if GLOBAL_SCALE not in self:
            layer: nn.QuantizedLinear | None = self._in_mlxs_layout(self.stock)
            if layer is not None:
                return layer
        plain = nn.Linear.__new__(nn.Linear)
        nn.Module.__init__(plain)
        plain.train(self.training)
        assert self.packed is not None
        of_super_blocks = self.packed.dtype == mx.uint16
        dtype = mx.float32 if of_super_blocks else None
        plain.weight = dequantize(self.packed, dtype)
        if "bias" in self:
            plain["bias"] = self["bias"]
        return plain

    def __call__(self, x: mx.array) -> mx.array:
        """Returns the product [..., n] of x [..., k], plus the bias if any."""
        size = x.size
        if size == self._last_stock_call or (
            self._stock_calls and self.is_stock_call(size)
        ):
            # Written out, because a call of a method would double the host time.
            y: mx.array = mx.quantized_matmul(
                x,
                self["weight"],
                scales=self["scales"],
                biases=self.get("biases"),
                transpose=True,
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
            )
            return y + self["bias"] if "bias" in self else y
        bias: mx.array | None = self.get("bias")
        weight = self.packed
        if bias is None and weight is not None:  # most layers
            return layer_product(x, weight, invariant=self.invariant)
        if weight is None and self._is_stock(x):
            if self._is_stock_in_all_dtypes(x):
                self.remember_stock(size)
            stock: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
            return stock
        # The kernel adds the bias, unless the bias promotes the result's dtype.
        if bias is None or self._keeps_dtype(x, bias):
            return self._product(x, bias)
        y = self._product(x, None) + bias
        return y  # noqa: RET504 (MLX is not annotated)

    def _is_stock_in_all_dtypes(self, x: mx.array) -> bool:
        """Returns whether stock MLX serves so many rows in all dtypes.

        It is True for few rows only, because every dtype has to be planned, and prompts
        have many shapes.
        """
        if x.size > FEW_ROWS * x.shape[-1]:
            return False
        others = (mx.zeros(x.shape, getattr(mx, name)) for name in DTYPE_BYTES)
        return all(map(self._is_stock, others))

    def _extra_repr(self) -> str:
        stock: str = super()._extra_repr()  # type: ignore[no-untyped-call]
        invariant = ", invariant" if self.invariant else ""
        return f"{stock}, layout={self.layout}{invariant}"


def _check_layer(
    name: str, layer: object, expected: type[nn.Module], *also: type[nn.Module]
) -> None:
    if not isinstance(layer, (expected, *also)):
        raise TypeError(
            f"{name} must be an nn.{expected.__name__}, got {type(layer).__name__}"
        )


def _check(
    layout: str, mode: str, bits: int | None, group_size: GroupSize = None
) -> None:
    check_format(group_size, bits, mode, may_be_row=True)
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {LAYOUTS}")
    if mode not in MODE_DEFAULTS:
        raise ValueError(f"mode={mode!r} is not one of {[*MODE_DEFAULTS]}")
    format_of(mode, MODE_DEFAULTS[mode][1] if bits is None else bits)


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
