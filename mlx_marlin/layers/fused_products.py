"""Products of a layer that are fused with the operations before and after them."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.backends import selection
from mlx_marlin.layers.guarded_parameters import GuardedParameters, native_weight
from mlx_marlin.planning.epilogue import Epilogue, Rotation
from mlx_marlin.products.linear import (
    GATED,
    Weight,
    fused_linear,
    layer_parts,
    layer_product,
)
from mlx_marlin.products.matmul import stock_serves
from mlx_marlin.products.reference.epilogue import check_rotation


class FusedProducts(GuardedParameters):
    """Products of a quantized layer, fused with their neighbours where kernels can."""

    @property
    def input_dims(self) -> int:
        """Columns of the weight, k."""
        if self.layout == "marlin":
            return self._k
        groups: int = self["scales"].shape[-1]
        return groups * self.group_size

    @property
    def output_dims(self) -> int:
        """Rows of the weight, n."""
        return len(self["scales"]) if self.layout == "mlx" else self._n

    def added(self, x: mx.array, residual: mx.array) -> mx.array:
        """Returns the layer's result plus a residual [..., n].

        Our kernels round the sum once. A call of the layer and an addition round twice.
        """
        bias: mx.array | None = self.get("bias")
        summands = [residual] if bias is None else [residual, bias]
        if all(self._keeps_dtype(x, summand) for summand in summands):
            return self._product(x, bias, residual)
        y: mx.array = residual + self(x)
        return y

    def parts(self, x: mx.array, sizes: tuple[int, ...]) -> tuple[mx.array, ...]:
        """Returns the product in parts, for a layer that joins several.

        `x`: activations [..., k].
        """
        known = self._stock_calls
        cuts = known.get((x.shape, x.dtype, sizes)) if known else None
        if cuts is None and self.layout == "mlx" and self._is_stock(x, sizes):
            cuts = [*accumulate(sizes)][:-1]
            self.remember_stock((x.shape, x.dtype, sizes), cuts)
        if cuts is not None:
            # `super()` would take the host longer.
            stock: Any = nn.QuantizedLinear
            return tuple(mx.split(stock.__call__(self, x), cuts, -1))
        bias: mx.array | None = self.get("bias")
        fused = bias if bias is None or self._keeps_dtype(x, bias) else None
        results = layer_parts(x, self._weight, sizes, fused, invariant=self.invariant)
        if fused is bias or bias is None:
            return results
        biases = mx.split(bias, [*accumulate(sizes)][:-1])
        return tuple(y + own for y, own in zip(results, biases, strict=True))

    def gated(self, x: mx.array) -> mx.array:
        """Returns SiLU of the product's first half, times its second half.

        The layer joins gate and up, in equal parts. If a kernel serves, the result is
        rounded once: the weight has no bias, the halves of a packed one are whole
        tiles, and on CUDA the weight is packed and there are up to 128 rows. On Metal
        the planner decides, and leaves one row in MLX's layout to stock MLX. Otherwise
        the result is rounded three times, as by separate layers.

        `x`: activations [..., k].
        """
        fused = "bias" not in self and self._has_fused_kernels()
        y: Any = fused_linear(x, self._weight, GATED, ()) if fused else None
        if y is None:
            gate, up = self.halves(x)
            y = nn.silu(gate) * up
        return y  # type: ignore[no-any-return]

    def normed(
        self,
        x: mx.array,
        norm: nn.RMSNorm,
        parts: tuple[int, ...] = (),
        gated: bool = False,
    ) -> Any:
        """Returns the layer's result for rows that an RMSNorm normalizes first.

        Kernels normalize few rows themselves: on Metal up to 2, if the planner does not
        leave them to stock MLX; on CUDA, for a packed weight, up to 8 rows of 4096
        values, and fewer if they are longer.

        `x`: activations [..., k].
        """
        bias: mx.array | None = self.get("bias")
        if self._takes(norm, x) and not (gated and bias is not None):
            epilogue = GATED if gated else Epilogue(bias=bias is not None, parts=parts)
            operands = [norm["weight"]] if bias is None else [bias, norm["weight"]]
            y = fused_linear(x, self._weight, epilogue, operands, norm.eps)
            if y is not None:
                return y
        x = norm(x)
        if gated:
            return self.gated(x)
        return self.parts(x, parts) if parts else self(x)

    def rotated(
        self,
        x: mx.array,
        norm: nn.RMSNorm,
        rotation: Rotation,
        parts: tuple[int, ...],
        positions: mx.array,
        freqs: mx.array,
        norms: tuple[mx.array, ...] = (),
    ) -> Any:
        """Returns the rotated heads of normalized rows, for a layer that joins several.

        The CUDA kernels rotate before they round, for a packed weight and heads of a
        multiple of 64 features, with norms up to 256 features. For more than 128 rows,
        MLX multiplies by the decoded weight, normalizes and rotates.

        `x`: activations [..., k]; every row is the next token of a stream.
        `positions`: position of each row, int32 [m]; or int32 of any length, whose
        first element is the position of all rows.
        `norms`: weights [features] of the heads' RMSNorms, in the dtype of x.
        """
        check_rotation(x.size // x.shape[-1], rotation, positions, freqs, norms)
        if not self._may_fuse(x) or any(weight.dtype != x.dtype for weight in norms):
            return None
        bias: mx.array | None = self.get("bias")
        epilogue = Epilogue(bias=bias is not None, parts=parts, rotation=rotation)
        operands = [*([] if bias is None else [bias]), positions, freqs, *norms]
        y, weight = None, self._weight
        if self._takes(norm, x):
            with_norm = [*operands, norm["weight"]]
            y = fused_linear(x, weight, epilogue, with_norm, norm.eps)
        return fused_linear(norm(x), weight, epilogue, operands) if y is None else y

    def _takes(self, norm: nn.RMSNorm, x: mx.array) -> bool:
        """Returns whether kernels could compute a norm before this layer."""
        if type(norm) is not nn.RMSNorm or not self._may_fuse(x):
            return False
        weight = norm["weight"]
        fits: bool = weight.shape == x.shape[-1:] and weight.dtype == x.dtype
        return fits

    def _may_fuse(self, x: mx.array) -> bool:
        """Returns whether a kernel could compute more than the product and the bias."""
        bias: mx.array | None = self.get("bias")
        keeps_dtype = bias is None or self._keeps_dtype(x, bias)
        return keeps_dtype and self._has_fused_kernels()

    def _has_fused_kernels(self) -> bool:
        """Returns whether kernels fuse more than a bias and a residual for the layer.

        They do for packed weights, and for MLX's layout where that is the default.
        """
        layouts = ("marlin", selection.traits().default_layout)
        return self.layout in layouts and not self.invariant

    def halves(self, x: mx.array) -> Iterable[mx.array]:
        """Returns both halves of the product, such as gate and up.

        `x`: activations [..., k]. For one row, both results are parts of one array.
        """
        if x.size == x.shape[-1] and not self.invariant:
            return mx.split(self(x), 2, axis=-1)
        return self.parts(x, (self.output_dims // 2,) * 2)

    @property
    def _weight(self) -> Weight:
        return self.packed or native_weight(self)

    def _product(
        self, x: mx.array, bias: mx.array | None, residual: mx.array | None = None
    ) -> mx.array:
        return layer_product(x, self._weight, bias, residual, invariant=self.invariant)

    def _keeps_dtype(self, x: mx.array, bias: mx.array) -> bool:
        scales = self["scales"] if self.layout == "mlx" else self["packed_scales"]
        return bias.dtype in (scales.dtype, x.dtype)

    def _is_stock(self, x: mx.array, parts: tuple[int, ...] = ()) -> bool:
        """Returns whether MLX's own product serves a call, with `layout="mlx"`."""
        bias: mx.array | None = self.get("bias")
        return stock_serves(
            x,
            native_weight(self),
            bias=bias is not None and self._keeps_dtype(x, bias),
            invariant=self.invariant,
            parts=parts,
        )
