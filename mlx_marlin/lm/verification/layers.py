"""The layers of a model that are compared, their products, and their exact weights."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_marlin.checkpoints.stored_weight import PackedLayer, StoredWeight
from mlx_marlin.layers.embedding import PackedEmbedding
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm.checkpoints.model_source import description
from mlx_marlin.lm.known_layers import (
    is_experts,
    is_heads,
    is_marlin_experts,
    is_marlin_heads,
)
from mlx_marlin.lm.layer_conversion import LayerConversion, is_marlin_layer
from mlx_marlin.lm.module_tree import computing_layers, has_tied_head, natural_key
from mlx_marlin.lm.optimize import optimize
from mlx_marlin.lm.verification.report import Floats
from mlx_marlin.lm.verification.thresholds import UNIT
from mlx_marlin.products import this_machine
from mlx_marlin.products.reference.weight import LARGEST_NVFP4
from mlx_marlin.weights.bit_streams import codes_of_words
from mlx_marlin.weights.dtypes import dtype_name

MOST_WEIGHTS = 2**21
"""Weights that are decoded at a time; each takes 8 bytes in each of a few arrays."""
BYTE_ROUNDING = 2.0**-23
"""Relative rounding of a weight whose scales are bytes: of its global scale."""


class Rows(NamedTuple):
    """Rows of one matrix of a weight."""

    matrix: int  # Index of the matrix, such as the expert; 0 if there is only one
    rows: slice  # Which rows of it
    values: Floats  # The weights in float64, columns in the order of x
    # Squares of what is added for each weight: of scale * code and of bias
    terms: Floats
    # Those of groups of columns in order; the weights if nothing shares one
    biases: Floats


@dataclass(frozen=True)
class ExactWeight:
    """A weight [n, k], or a batch of them, which is decoded without rounding."""

    stored: StoredWeight | PackedLayer | mx.array

    @property
    def is_quantized(self) -> bool:
        """Whether the weight has codes."""
        return not isinstance(self.stored, mx.array)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Matrices, rows and columns."""
        *batch, n, k = self._native.shape
        return int(np.prod(batch)), n, k

    @property
    def description(self) -> str:
        """The format, such as "affine 4-bit, group 64"."""
        return description(self.stored)

    @property
    def format(self) -> tuple[str, int, int] | None:
        """Mode, bits and group size; None if it is plain."""
        if isinstance(self.stored, mx.array):
            return None
        weight = self.stored
        packed = weight.weight if isinstance(weight, PackedLayer) else weight
        return packed.mode, packed.bits, packed.group_size

    @property
    def rounding(self) -> float:
        """Relative rounding of a number in the dtype of the scales or weights."""
        native = self._native
        array = native if isinstance(native, mx.array) else native.scales
        return UNIT.get(dtype_name(array.dtype), BYTE_ROUNDING)

    def chunks(self, matrices: set[int] | None = None) -> Iterator[Rows]:
        """Yields the rows of the weight, at most `MOST_WEIGHTS` weights at a time."""
        count, n, k = self.shape
        step = max(1, MOST_WEIGHTS // k)
        for matrix in range(count):
            if matrices is not None and matrix not in matrices:
                continue
            for first in range(0, n, step):
                rows = slice(first, min(first + step, n))
                yield Rows(matrix, rows, *self._decoded(matrix, rows))

    @cached_property
    def _native(self) -> StoredWeight | mx.array:
        """The weight in rows of codes, with float scales."""
        stored = self.stored
        if isinstance(stored, mx.array):
            return stored
        if isinstance(stored, PackedLayer):
            stored = stored.stored()
        return stored.with_float_scales()

    def _decoded(self, matrix: int, rows: slice) -> tuple[Floats, Floats, Floats]:
        """Returns what `Rows` has of some rows beside their places."""
        weight = self._native
        if isinstance(weight, mx.array):
            values = as_float64(_rows_of(weight, matrix, rows))
            return values, values**2, values
        own = replace(
            weight,
            codes=_rows_of(weight.codes, matrix, rows),
            scales=_rows_of(weight.scales, matrix, rows),
            biases=None
            if weight.biases is None
            else _rows_of(weight.biases, matrix, rows),
        )
        floating = own.scales.dtype == mx.uint8
        if floating:
            values = _of_floats(own, matrix)
            terms = values**2
        else:
            values, terms, biases = _of_integers(own)
        if own.input_order is not None:
            places = np.argsort(np.array(own.input_order))
            values, terms = values[:, places], terms[:, places]
        has_biases = not floating and own.input_order is None
        return values, terms, biases if has_biases else values


def as_float64(array: mx.array) -> Floats:
    """Returns an array of MLX's in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _rows_of(array: mx.array, matrix: int, rows: slice) -> mx.array:
    return array.reshape(-1, *array.shape[-2:])[matrix, rows]


def _of_integers(weight: StoredWeight) -> tuple[Floats, Floats, Floats]:
    """Decodes integers: scale * code + bias, where a zero point is -bias / scale."""
    codes = np.array(codes_of_words(weight.codes, weight.bits)).astype(np.float64)
    scales = as_float64(weight.scales)
    if weight.codebook is not None:
        codes = as_float64(weight.codebook)[codes.astype(int)]
        biases = np.zeros_like(scales)
    elif weight.mode == "symmetric":
        biases = -scales * 2.0 ** (weight.bits - 1)
    else:
        assert weight.biases is not None
        second = as_float64(weight.biases)
        biases = second if weight.mode == "affine" else -scales * second
    groups = codes.reshape(*scales.shape, -1)
    scaled, bias = scales[..., None] * groups, biases[..., None]
    values, terms = scaled + bias, scaled**2 + bias**2
    return values.reshape(codes.shape), terms.reshape(codes.shape), biases


def _of_floats(weight: StoredWeight, matrix: int) -> Floats:
    """Decodes small floats: code times scale is exact in float32."""
    decoded = mx.dequantize(
        weight.codes,
        weight.scales,
        None,
        weight.group_size,
        weight.bits,
        weight.mode,
        dtype=mx.float32,
    )
    values = as_float64(decoded)
    if weight.global_scale is not None:
        factors = as_float64(weight.global_scale).reshape(-1)
        values = values * (factors[matrix % factors.size] / LARGEST_NVFP4)
    return values


@dataclass(frozen=True, eq=False)
class CheckedLayer:
    """A layer of a model with one weight or a batch of them."""

    name: str  # Path of the module in the model
    module: Any  # The layer
    # "linear", "lookup" (an embedding's), "head" (an embedding used as the output
    # head), "experts" or "heads" (of latent attention)
    operation: str

    @property
    def is_ours(self) -> bool:
        """Whether `optimize` or `load` made the layer run on our kernels."""
        own = self._inner
        return isinstance(own, MarlinPart) or is_marlin_layer(own)

    @property
    def is_quantized(self) -> bool:
        """Whether the weight has codes."""
        return hasattr(self._inner, "bits")

    def weight(self) -> ExactWeight:
        """Returns the weight that the layer holds; packed weights are unpacked."""
        return ExactWeight(_stored(self.module))

    @property
    def heads(self) -> int:
        """Number of heads; 1 for other layers."""
        if self.operation != "heads":
            return 1
        own = self.module
        return int(own["words" if "words" in own else "scales"].shape[0])

    @property
    def bias(self) -> mx.array | None:
        """The bias [n] or [matrices, n]; None if there is none."""
        own = self._inner
        has_bias = self.operation in ("linear", "experts") and "bias" in own
        return own["bias"] if has_bias else None

    @property
    def sums(self) -> str | None:
        """Dtype in which products are added; None for that of the result.

        MLX's own products on a CPU add in the dtype of the activations.
        """
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        is_stock = not self.is_ours or this_machine.why_not(on_cpu) is not None
        return None if on_cpu and is_stock else "float32"

    @property
    def _inner(self) -> Any:
        own = self.module
        return own.linear if isinstance(own, ReorderedLinear) else own

    def product(self, x: mx.array, matrices: mx.array) -> mx.array:
        """Returns what the layer computes for rows of x, each with one of its matrices.

        `x`: activations [rows, k]; for "lookup" the tokens [rows]. For "heads" there
        are as many rows for each head, and heads alternate.
        `matrices`: uint32 [rows], the matrix of each row.
        """
        own = self.module
        match self.operation:
            case "head":
                y = own.as_linear(x)
            case "experts":
                y = own(x[:, None, None], matrices[:, None])
            case "heads":
                apart = x.reshape(-1, self.heads, x.shape[-1]).swapaxes(0, 1)
                y = own(apart).swapaxes(0, 1)
            case _:
                y = own(x)
        return y.reshape(x.shape[0], -1)  # type: ignore[no-any-return]


def checked_layers(model: nn.Module) -> Iterator[CheckedLayer]:
    """Yields the linear layers, embeddings, experts and heads of a model.

    An embedding is also an output head if the model has no layer called lm_head. Plain
    layers are among them, because a source may have them quantized.
    """
    named = [(name, module) for name, module in model.named_modules()]
    inner = {id(m.linear) for _, m in named if isinstance(m, ReorderedLinear)}
    with_head = has_tied_head(model)
    for name, module in sorted(named, key=lambda pair: natural_key(pair[0])):
        if id(module) in inner:
            continue
        for operation in _operations(module, with_head):
            yield CheckedLayer(name, module, operation)


def with_our_layers(model: nn.Module) -> nn.Module:
    """Converts a model's layers as `optimize` does by default, but one by one.

    Layers with the same input are not joined, and decoder blocks are not traced.
    """
    if any(map(LayerConversion().applies_to, computing_layers(model))):
        optimize(model, join=False, trace=False)
    return model


def _operations(module: nn.Module, is_tied: bool) -> tuple[str, ...]:
    if isinstance(module, nn.QuantizedEmbedding | nn.Embedding | PackedEmbedding):
        return ("lookup", "head") if is_tied else ("lookup",)
    if is_experts(module) or is_marlin_experts(module):
        return ("experts",)
    if is_heads(module) or is_marlin_heads(module):
        return ("heads",)
    if isinstance(module, ReorderedLinear):
        return _operations(module.linear, is_tied)
    if isinstance(module, nn.QuantizedLinear | nn.Linear):
        return ("linear",)
    return ()


def _stored(module: Any) -> StoredWeight | PackedLayer | mx.array:
    """Returns the weight of a layer, without decoding it."""
    if isinstance(module, ReorderedLinear):
        inner = _stored(module.linear)
        order = module.input_order
        if isinstance(inner, mx.array):
            return inner[..., mx.argsort(order)]
        if isinstance(inner, PackedLayer):
            return PackedLayer(inner.weight, order)
        return replace(inner, input_order=order)
    if type(module) in (nn.Linear, nn.Embedding):
        return module.weight  # type: ignore[no-any-return]
    packed = getattr(module, "packed", None)
    if packed is not None:
        return PackedLayer(packed)
    return StoredWeight(
        codes=module.weight,
        scales=module.scales,
        biases=getattr(module, "biases", None),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        global_scale=getattr(module, "global_scale", None),
    )
