"""The product that a layer computes, and its calls."""

from dataclasses import dataclass, replace

from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.products.request import Gather, Request
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

    def request(self, m: int, on_cpu: bool, biased: bool = False) -> Request:
        """Returns the call of the layer, for experts as mlx-lm makes it.

        `biased`: whether the kernel of experts adds the layer's bias.
        """
        w, transpose = self.weight, "not transposed" not in self.operation
        assert w is not None
        x_dtype, scale_dtype = dtypes.dtype(self.dtype), dtypes.dtype(w.scale_dtype)
        inner, outer = (w.k, w.n) if transpose else (w.n, w.k)
        request = Request(
            x_shape=(*w.batch, m, inner),
            x_dtype=x_dtype,
            shape=(*w.batch, m, outer),
            dtype=dtypes.result_dtype(x_dtype, scale_dtype),
            n=w.n,
            k=w.k,
            w_batch=w.batch,
            scale_dtype=scale_dtype,
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
        return self._of_experts(request, m, biased) if self.choices else request

    def _of_experts(self, request: Request, m: int, biased: bool) -> Request:
        pairs = m * self.choices
        is_sorted = pairs >= SORTED_PAIRS
        shape = (pairs,) if is_sorted else (m, self.choices)
        return replace(
            request,
            x_shape=(pairs, 1, request.k) if is_sorted else (m, 1, 1, request.k),
            shape=(*shape, 1, request.n),
            w_batch=(),
            epilogue=PLAIN,
            experts=Gather(
                experts=request.w_batch[0],
                pairs=shape,
                rows_are_named=False,
                is_sorted=is_sorted,
                biased=biased and self.bias,
            ),
        )
