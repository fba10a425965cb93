"""Compares one layer with float64 products and with its source."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mlx_marlin.lm.verification.activations import Activations
from mlx_marlin.lm.verification.checked_layers import CheckedLayer
from mlx_marlin.lm.verification.errors import Errors, Floats
from mlx_marlin.lm.verification.exact_weights import ExactWeight, Rows, as_float64
from mlx_marlin.lm.verification.report import LayerReport, ProductReport
from mlx_marlin.lm.verification.thresholds import Sizes, feature_limit, product_limit
from mlx_marlin.lm.verification.weight_comparison import WeightComparison
from mlx_marlin.weights.dtypes import dtype_name


def compare(
    layer: CheckedLayer,
    weight: ExactWeight,
    inputs: Sequence[Activations],
    rows: Sequence[int],
    source: ExactWeight | None = None,
) -> LayerReport:
    """Compares what a layer computes with float64, and its weight with the source's."""
    own = [Reference.empty(each, weight) for each in inputs]
    theirs = [Reference.empty(each, weight) for each in inputs if source is not None]
    comparison = None if source is None else WeightComparison(weight, source)
    used = {int(i) for each in own for i in np.unique(each.matrices)}
    chunks = weight.chunks(used if source is None else None)
    source_chunks = iter(()) if source is None else source.chunks()
    for chunk in chunks:
        for reference in own:
            reference.add(chunk)
        if comparison is None:
            continue
        other = next(source_chunks)
        comparison.add(chunk, other)
        for reference in theirs:
            reference.add(other)
    products = [
        product
        for index, each in enumerate(inputs)
        for count in _counts(each, rows)
        for product in _products(
            layer,
            own[index].first(count, each),
            theirs[index].first(count, each) if theirs else None,
            comparison,
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

    def first(self, rows: int, inputs: Activations) -> "Reference":
        """Returns the reference of the first rows of the activations."""
        count = rows * inputs.step
        return Reference(
            inputs=inputs.first(rows),
            x=self.x[:count],
            matrices=self.matrices[:count],
            k=self.k,
            result=self.result[:count],
            terms=self.terms[:count],
            biases=self.biases[:count],
        )


def _counts(inputs: Activations, rows: Sequence[int]) -> list[int]:
    """Returns the distinct numbers of rows, at most as many as there are."""
    return [*dict.fromkeys(min(count, inputs.rows) for count in rows)]


def _products(
    layer: CheckedLayer,
    own: Reference,
    source: Reference | None,
    weights: WeightComparison | None,
) -> Iterator[ProductReport]:
    """Computes a product with a layer, and yields its errors."""
    inputs = own.inputs
    y = layer.product(inputs.x, inputs.matrices)
    actual, dtype = as_float64(y), dtype_name(y.dtype)
    sums = layer.sums or dtype
    bias = _bias(layer, own)
    results = own.result**2 + bias**2
    limit = product_limit(_sizes(results, own.terms, None), dtype, own.k, sums)
    limits = feature_limit(_sizes(results, own.terms, 0), dtype, own.k, sums)
    error = np.sqrt(((actual - own.result - bias) ** 2).sum(0))
    wrong = np.flatnonzero(~(error <= limits))  # NaN is wrong

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
