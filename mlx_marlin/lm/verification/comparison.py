"""Compares one layer with float64 products and with its source."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mlx_marlin.lm.verification.inputs import Activations
from mlx_marlin.lm.verification.layers import (
    CheckedLayer,
    ExactWeight,
    Rows,
    as_float64,
)
from mlx_marlin.lm.verification.report import (
    Errors,
    Floats,
    LayerReport,
    ProductReport,
    WeightReport,
)
from mlx_marlin.lm.verification.thresholds import (
    FEW,
    Sizes,
    product_limit,
    quantization_limit,
)
from mlx_marlin.weights.dtypes import dtype_name

ROW_FACTOR = 2.0
"""Limit of a row's quantization error, in that of the whole weight."""


class WeightComparison:
    """The differences of all rows of a weight, which are added one chunk at a time.

    If both have the same bits and group size, or only the source is quantized, numbers
    may differ by rounding them once, such as biases in MLX's layout. Otherwise weights
    were quantized, and rows are compared with the limit of the format.
    """

    def __init__(self, own: ExactWeight, source: ExactWeight) -> None:
        self._source = source.description
        self.rounding = max(own.rounding, source.rounding)
        self.limit = 0.0 if _has_codes_of(own, source) else _limit(own)
        self._changed = self._total = 0.0
        self._count = self._wrong = 0
        self._first: tuple[int, ...] | None = None

    @property
    def rms_limit(self) -> float:
        """Limit of the rms difference of quantized weights that were added."""
        return self.limit * math.sqrt(self._total / max(self._count, 1))

    def add(self, own: Rows, source: Rows) -> None:
        """Compares some rows with the same rows of the source."""
        change = np.abs(own.values - source.values)
        self._changed += float((change**2).sum())
        self._total += float((source.values**2).sum())
        self._count += change.size
        if self.limit:
            norms = np.sqrt((source.values**2).sum(1))
            changed = np.sqrt((change**2).sum(1))
            wrong = ~(changed <= ROW_FACTOR * self.limit * norms)
        else:
            terms = np.sqrt(np.maximum(own.terms, source.terms))
            wrong = ~(change <= self.rounding * terms)
        count = int(np.count_nonzero(wrong))
        if count and self._first is None:
            row, *column = (int(i) for i in np.argwhere(wrong)[0])
            self._first = (own.matrix, own.rows.start + row, *column)
        self._wrong += count

    def report(self) -> WeightReport:
        """Returns the differences of all rows that were added."""
        size = math.sqrt(self._total)
        changed = math.sqrt(self._changed)
        return WeightReport(
            source=self._source,
            relative=changed / size if size else math.inf if changed else 0.0,
            limit=self.limit,
            wrong=self._wrong,
            first_wrong=self._first,
        )


def _has_codes_of(own: ExactWeight, source: ExactWeight) -> bool:
    """Returns whether a weight was imported, not quantized."""
    if own.format is None or source.format is None:
        return own.format is None
    return own.format[1:] == source.format[1:]


def _limit(own: ExactWeight) -> float:
    assert own.format is not None
    mode, bits, _ = own.format
    return quantization_limit(mode, bits)


def compare(
    layer: CheckedLayer,
    weight: ExactWeight,
    inputs: Sequence[Activations],
    rows: Sequence[int],
    source: ExactWeight | None = None,
) -> LayerReport:
    """Compares what a layer computes with float64, and its weight with the source's."""
    weights = [weight] if source is None else [weight, source]
    own, *theirs = ([Reference.empty(each, weight) for each in inputs] for _ in weights)
    comparison = None if source is None else WeightComparison(weight, source)
    used = {int(i) for each in own for i in np.unique(each.matrices)}
    wanted = used if source is None else None
    for chunks in zip(*(each.chunks(wanted) for each in weights), strict=True):
        for references, chunk in zip((own, *theirs), chunks, strict=True):
            for reference in references:
                reference.add(chunk)
        if comparison is not None:
            comparison.add(*chunks)
    products = [
        product
        for index, each in enumerate(inputs)
        for count in _counts(each, rows)
        for product in _products(
            layer,
            *(references[index].first(count) for references in (own, *theirs)),
            weights=comparison,
        )
    ]
    return LayerReport(
        name=layer.name,
        operation=layer.operation,
        format=weight.description,
        is_ours=layer.is_ours,
        products=tuple(products),
        weights=None if comparison is None else comparison.report(),
    )


@dataclass(frozen=True, eq=False)
class Reference:
    """Exact results for rows of activations, without the bias."""

    inputs: Activations  # The activations
    x: Floats  # The same in float64, or the tokens of a look-up
    matrices: NDArray[np.uint32]  # The matrix of each row
    k: int  # Number of products that are added; 1 for a look-up
    result: Floats  # Exact results [rows, n]
    terms: Floats  # Squares of the norms of what is added, [rows, n]
    biases: Floats  # Squares of the norms of what each bias adds, [rows, n]

    @classmethod
    def empty(cls, inputs: Activations, weight: ExactWeight) -> Self:
        """Returns a reference to which the rows of a weight are to be added."""
        _, n, k = weight.shape
        is_lookup = inputs.x.ndim == 1
        shape = inputs.x.shape[0], k if is_lookup else n
        x = np.array(inputs.x).astype(float) if is_lookup else as_float64(inputs.x)
        return cls(
            inputs=inputs,
            x=x,
            matrices=np.array(inputs.matrices),
            k=1 if is_lookup else k,
            result=np.zeros(shape),
            terms=np.zeros(shape),
            biases=np.zeros(shape),
        )

    def add(self, chunk: Rows) -> None:
        """Adds what some rows of the weight contribute."""
        if self.x.ndim == 1:
            own = (self.x >= chunk.rows.start) & (self.x < chunk.rows.stop)
            rows = (self.x[own] - chunk.rows.start).astype(np.int64)
            self.result[own], self.terms[own] = chunk.values[rows], chunk.terms[rows]
            biases = chunk.biases[rows]
            size = self.result.shape[1] // biases.shape[1]
            self.biases[own] = np.repeat(biases, size, axis=1) ** 2
            return
        own = self.matrices == chunk.matrix
        x = self.x[own]
        self.result[own, chunk.rows] = x @ chunk.values.T
        self.terms[own, chunk.rows] = (x * x) @ chunk.terms.T
        # One bias multiplies the sum of its group, whose terms are not independent.
        sums = x.reshape(len(x), chunk.biases.shape[1], -1).sum(-1)
        self.biases[own, chunk.rows] = (sums * sums) @ (chunk.biases**2).T

    @property
    def size_of_inputs(self) -> float:
        """Norm of the results if all weights were 1 and of random signs.

        Quantization errors of a layer are of similar size, also where weights that
        large activations meet are small.
        """
        n = self.result.shape[1]
        squares = n * (self.x**2).sum() if self.x.ndim == 2 else self.result.size
        return float(np.sqrt(squares))

    def first(self, rows: int) -> "Reference":
        """Returns the reference of the first rows of the activations."""
        arrays = ("x", "matrices", "result", "terms", "biases")
        count = rows * self.inputs.step
        first: dict[str, Any] = {name: getattr(self, name)[:count] for name in arrays}
        return replace(self, inputs=self.inputs.first(rows), **first)


def _counts(inputs: Activations, rows: Sequence[int]) -> list[int]:
    """Returns the distinct numbers of rows, at most as many as there are."""
    return [*dict.fromkeys(min(count, inputs.rows) for count in rows)]


def _products(
    layer: CheckedLayer,
    own: Reference,
    source: Reference | None = None,
    *,
    weights: WeightComparison | None,
) -> Iterator[ProductReport]:
    """Computes a product with a layer, and yields its errors."""
    inputs = own.inputs
    y = layer.product(inputs.x, inputs.matrices)
    actual, dtype = as_float64(y), dtype_name(y.dtype)
    sums = layer.sums or dtype
    bias = _bias(layer, own)
    results = own.result**2 + bias**2
    limit, limits = (
        product_limit(_sizes(results, own.terms, axis), dtype, own.k, sums)
        for axis in (None, 0)
    )
    error = np.sqrt(((actual - own.result - bias) ** 2).sum(0))
    wrong = np.flatnonzero(~(error <= FEW * limits))  # NaN is wrong

    def report(name: str, exact: Floats, limit: float) -> ProductReport:
        size = np.linalg.norm(exact)
        features = wrong.tolist() if name == "weights" else []
        return ProductReport(
            activations=inputs.source,
            rows=inputs.rows,
            reference=name,
            dtype=dtype,
            errors=Errors.of(actual, exact),
            limit=float(limit / size if size else limit),
            wrong_features=len(features),
            first_wrong_feature=features[0] if features else None,
        )

    yield report("weights", own.result + bias, limit)
    if source is not None and weights is not None:
        changed = weights.rms_limit * source.size_of_inputs
        if not weights.limit:
            # Twice, because a layer may have few groups and a single output.
            changed = 2 * weights.rounding * np.sqrt(own.biases.sum())
        yield report("source", source.result + bias, limit + changed)


def _bias(layer: CheckedLayer, reference: Reference) -> Floats:
    """Returns the bias of each element of the result; zeros if there is none."""
    bias = layer.bias
    if bias is None:
        return np.zeros((1, 1))
    values = as_float64(bias)
    return values[reference.matrices] if values.ndim == 2 else values[None]


def _sizes(results: Floats, terms: Floats, axis: int | None) -> Sizes:
    """Returns the sizes of a product from the squares of its elements."""
    return Sizes(
        result=np.sqrt(results.sum(axis)),
        terms=np.sqrt(terms.sum(axis)),
        count=terms.size if axis is None else terms.shape[axis],
    )
