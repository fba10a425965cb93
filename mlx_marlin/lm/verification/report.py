"""What a verification found, for layers and for a whole model."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mlx_marlin.lm.module_tree import common_path, pattern
from mlx_marlin.tables import Table, Value, printed

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of a result."""

    relative: float  # Frobenius norm of the error, relative to that of the exact result
    nmse: float  # Its square: the mean square error, normalized
    max_error: float  # The largest absolute error of an element
    rms_error: float  # The root of the mean square error

    @classmethod
    def of(cls, actual: Floats, exact: Floats) -> Self:
        """Compares a result with the exact one; all errors are NaN if one element is.

        The relative error of an exact result of zeros is 0 or infinite.
        """
        error = np.abs(actual - exact)
        norm, size = np.linalg.norm(error), np.linalg.norm(exact)
        relative = float(norm / size) if size else float(np.inf if norm else norm)
        return cls(
            relative=relative,
            nmse=relative**2,
            max_error=float(error.max()),
            rms_error=float(norm / np.sqrt(error.size)),
        )


HEADS = (
    *("layer", "format", "largest error", "rms error", "relative", "limit"),
    *("kernels, relative", "their limit", "verdict"),
)
"""Heads of the table. Against a source, errors are those of its weights; those of the
kernels alone then follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductReport:
    """Errors of a layer's results for some rows of activations."""

    activations: str  # "random" or "captured"
    rows: int  # Number of rows
    # "weights" if the exact result is that of the layer's own weights, "source" if it
    # is that of the source's
    reference: str
    dtype: str  # Dtype of the results
    errors: Errors  # Errors against the exact result
    limit: float  # Limit of the relative error
    # Output features whose results are above the limit for a single one
    wrong_features: int = 0
    first_wrong_feature: int | None = None  # The first of them, or None

    @property
    def failures(self) -> Iterator[str]:
        """Yields what is above a limit."""
        where = f"{self.rows} {self.activations} rows, against the {self.reference}"
        if not self.errors.relative <= self.limit:  # NaN fails
            yield (
                f"{where}: relative error {self.errors.relative:.2e}, limit "
                f"{self.limit:.2e}"
            )
        if self.wrong_features:
            yield (
                f"{where}: {self.wrong_features} output features are wrong, the first "
                f"is {self.first_wrong_feature}"
            )

    def shares(self) -> list[str]:
        """Returns the relative error and its limit as text."""
        return [f"{self.errors.relative:.1e}", f"{self.limit:.1e}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReport:
    """Differences between a layer's weight and its source's."""

    source: str  # Format of the source
    relative: float  # Frobenius norm of the difference, relative to that of the source
    # Limit of the relative error; 0 if the weight has the codes of the source and may
    # differ only by rounding of single numbers
    limit: float
    # Weights that differ by more than rounding; if `limit` is not 0, rows whose
    # relative error is above the limit for one row
    wrong: int
    # (matrix, row, column) of the first of them, or (matrix, row)
    first_wrong: tuple[int, ...] | None

    @property
    def failures(self) -> Iterator[str]:
        """Yields what is above a limit."""
        if self.limit and not self.relative <= self.limit:
            yield (
                f"weights: relative error {self.relative:.2e} against the source, "
                f"limit {self.limit:.2e}"
            )
        if self.wrong:
            what = "rows are too far from" if self.limit else "codes or scales are not"
            yield (
                f"weights: {self.wrong} {what} the source's, first at "
                f"{_position(self.first_wrong)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """The comparison of one layer."""

    name: str  # Path of the module
    operation: str  # "linear", "lookup", "head", "experts" or "heads"
    format: str  # Format of its weight
    is_ours: bool  # Whether it runs on our kernels
    products: tuple[ProductReport, ...]  # Errors of its results
    # Differences from the source's weight; None without a source
    weights: WeightReport | None = None

    @property
    def failures(self) -> list[str]:
        """Everything that is above a limit; empty if the layer passes."""
        of_products = [text for each in self.products for text in each.failures]
        return [*of_products, *(self.weights.failures if self.weights else ())]

    def worst(self, reference: str) -> ProductReport:
        """Returns the product whose error is the largest part of its limit."""
        products = [each for each in self.products if each.reference == reference]
        return max(products, key=_part)

    @property
    def shown(self) -> ProductReport:
        """The product whose errors the report's table has."""
        return self.worst("weights" if self.weights is None else "source")

    def cells(self, path: str) -> list[str]:
        """Returns the cells of the report's table, `HEADS`, for layers of a path."""
        title = [path, *([] if self.operation == "linear" else [self.operation])]
        errors = [self.shown.errors.max_error, self.shown.errors.rms_error]
        has_source = self.weights is not None
        return [
            ", ".join(title),
            self.format,
            *(f"{error:.1e}" for error in errors),
            *self.shown.shares(),
            *(self.worst("weights").shares() if has_source else ("", "")),
            "FAILED" if self.failures else "ok",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexities:
    """Perplexity on the text."""

    before: float  # Of the source, or without one, of stock MLX with the same weights
    after: float  # Of the model
    tokens: int  # Tokens that were predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of `verify`.

    Attributes:
        backend: The back end that computed the products.
        seed: Seed of the random activations.
        layers: A report for each operation of each layer.
        without_source: Quantized layers that the source has no weight for.
        moved: Layers that `apply` put on stock MLX.
        not_moved: Layers that it could not, each with the reason.
        perplexity: Perplexity before and after; None without a text.
    """

    backend: str
    seed: int
    layers: tuple[LayerReport, ...]
    without_source: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    not_moved: tuple[str, ...] = ()
    perplexity: Perplexities | None = None

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the layers that are above a limit."""
        return tuple(dict.fromkeys(each.name for each in self.layers if each.failures))

    @property
    def passed(self) -> bool:
        """Whether all layers were compared and none is above a limit."""
        return not self.failed and not self.without_source

    def as_dict(self) -> dict[str, Any]:
        """Returns all values by name, for JSON."""
        values = dataclasses.asdict(self)
        return values | {"failed": [*self.failed], "passed": self.passed}

    def __str__(self) -> str:
        rows = [*self._rows()]
        lines = [printed(Table(title="", rows=rows))] if rows else []
        lines += [f"{x.name}: {text}" for x in self.layers for text in x.failures]
        lines += [
            f"{name}: the source has no such weight" for name in self.without_source
        ]
        lines += [f"{name}: stays on stock MLX from now on" for name in self.moved]
        lines += [f"{text}, so it stays on our kernels" for text in self.not_moved]
        if self.perplexity is not None:
            before, after = self.perplexity.before, self.perplexity.after
            lines.append(
                f"perplexity {before:.4f} before, {after:.4f} after "
                f"({after / before - 1:+.2%}, {self.perplexity.tokens} tokens)"
            )
        return "\n".join([*lines, self._summary()])

    def _rows(self) -> Iterator[dict[str, Value]]:
        """Yields a row for equal layers: that of the nearest to its limit."""
        groups: dict[tuple[object, ...], list[LayerReport]] = {}
        for each in self.layers:
            key = pattern(each.name), each.operation, each.format, not each.failures
            groups.setdefault(key, []).append(each)
        for group in groups.values():
            worst = max(group, key=lambda each: _part(each.shown))
            path = common_path([each.name for each in group])
            head, *others = zip(HEADS, worst.cells(path), strict=True)
            yield dict([head, ("count", len(group)), *others])

    def __repr__(self) -> str:
        """Returns a line; `str` has the table."""
        return f"<{type(self).__name__}: {self._summary()}>"

    def _summary(self) -> str:
        names = {layer.name for layer in self.layers}
        missing = len(self.without_source)
        return (
            f"{len(names) - len(self.failed)} of {len(names) + missing} layers passed, "
            f"{len(self.failed)} failed, {missing} without a source (back end: "
            f"{self.backend}, seed {self.seed})"
        )


def _position(first: tuple[int, ...] | None) -> str:
    names = ("matrix", "row", "column")
    return ", ".join(f"{n} {i}" for n, i in zip(names, first or (), strict=False))


def _part(product: ProductReport) -> float:
    """Returns how much of a limit an error takes; infinite for NaN."""
    part = product.errors.relative / product.limit if product.limit else float("inf")
    return part if part == part else float("inf")
