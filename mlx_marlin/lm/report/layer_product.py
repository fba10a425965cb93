"""The product that a layer computes, and its calls."""

from dataclasses import dataclass

from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.products.experts.request import GatherRequest
from mlx_marlin.products.request import MatmulRequest
from mlx_marlin.weights import dtypes

SORTED_PAIRS = 64
"""Pairs from which mlx-lm sorts the experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A quantized weight, or several of one shape."""

    n: int  # Rows of the weight
    k: int  # Columns of the weight
    mode: str  # The quantization scheme
    bits: int  # Bits of a code
    group_size: int  # Weights that share a scale
    scale_dtype: str  # Dtype of the scales
    layout: str  # "mlx" or "marlin"
    batch: tuple[int, ...] = ()  # Number of heads or experts; () for one weight
    global_scale: bool = False  # Whether there is a global scale


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProduct:
    """What a layer computes."""

    layer: str  # The class of the layer
    # "linear", "as_linear", "heads", "heads, not transposed" or "experts"
    operation: str
    # The weight, in the layout that it has after `optimize`; None if the layer
    # multiplies by none that is quantized
    weight: Weight | None
    dtype: str  # Dtype of the activations
    is_converted: bool  # Whether the layer is one of ours already
    # Why `optimize` leaves the layer to stock MLX; None if it does not
    stays: str | None = None
    bias: bool = False  # Whether the product adds a bias
    parts: tuple[int, ...] = ()  # Rows of the layers that are joined
    invariant: bool = False  # Whether a row's bits must not depend on the other rows
    choices: int = 0  # Experts that a row chooses; 0 if the weights are not experts

    def request(self, m: int, on_cpu: bool) -> MatmulRequest:
        """Returns the call of a layer that is not one of experts."""
        w, transpose = self.weight, "not transposed" not in self.operation
        assert w is not None
        x_dtype, scale_dtype = dtypes.dtype(self.dtype), dtypes.dtype(w.scale_dtype)
        inner, outer = (w.k, w.n) if transpose else (w.n, w.k)
        return MatmulRequest(
            x_shape=(*w.batch, m, inner),
            x_dtype=x_dtype,
            shape=(*w.batch, m, outer),
            dtype=dtypes.result_dtype(x_dtype, scale_dtype),
            n=w.n,
            k=w.k,
            w_batch=w.batch,
            scale_dtype=scale_dtype,
            scales_alike=True,
            mode=w.mode,
            bits=w.bits,
            group_size=w.group_size,
            transpose=transpose,
            layout=w.layout,
            on_cpu=on_cpu,
            epilogue=Epilogue(bias=self.bias, parts=self.parts),
            invariant=self.invariant,
            global_scale=w.global_scale,
        )

    def gather_request(self, m: int, on_cpu: bool, biased: bool) -> GatherRequest:
        """Returns the call of a layer of experts, as mlx-lm makes it."""
        w, pairs = self.weight, m * self.choices
        assert w is not None
        is_sorted = pairs >= SORTED_PAIRS
        x_dtype, scale_dtype = dtypes.dtype(self.dtype), dtypes.dtype(w.scale_dtype)
        return GatherRequest(
            x_shape=(pairs, 1, w.k) if is_sorted else (m, 1, 1, w.k),
            dtype=dtypes.result_dtype(x_dtype, scale_dtype),
            experts=w.batch[0],
            n=w.n,
            k=w.k,
            scale_dtype=scale_dtype,
            pairs=(pairs,) if is_sorted else (m, self.choices),
            rows_are_named=False,
            transpose=True,
            group_size=w.group_size,
            bits=w.bits,
            mode=w.mode,
            layout=w.layout,
            is_sorted=is_sorted,
            invariant=self.invariant,
            has_global_scale=w.global_scale,
            on_cpu=on_cpu,
            biased=biased and self.bias,
        )
