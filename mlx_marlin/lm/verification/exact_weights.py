"""Weights in float64, some rows at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_marlin.checkpoints.stored_weight import PackedLayer, StoredWeight
from mlx_marlin.lm.verification.errors import Floats
from mlx_marlin.lm.verification.thresholds import UNIT
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
        if isinstance(self.stored, mx.array):
            return dtype_name(self.stored.dtype)
        assert self.format is not None
        mode, bits, group_size = self.format
        return f"{mode} {bits}-bit, group {group_size}"

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
