"""Finds the problems that a model's quantized layers pose."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.nn as nn

from mlx_marlin.layers.native import activation_dtype
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES, FORMATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The quantized layers of a model.

    Attributes:
        counts: How often each product in a supported format occurs, with one row.
        others: Number of quantized layers in unsupported formats.
    """

    counts: Counter[Problem]
    others: int

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The distinct products in supported formats, with one row."""
        return tuple(self.counts)


def find(model: nn.Module, layouts: Sequence[str] = ("mlx",)) -> Found:
    """Finds the products of a model's quantized linear layers.

    An embedding counts if it is also the output head.

    Args:
        model: Any module. Its weights need not be loaded.
        layouts: Layouts of the weights.
    """
    layers = [*_multiplied(model)]
    supported = [layer for layer in layers if _is_supported(layer)]
    dtype = dtype_name(activation_dtype(model))
    counts = Counter(
        _problem(layer, layout, dtype) for layer in supported for layout in layouts
    )
    return Found(counts=counts, others=len(layers) - len(supported))


def with_rows(problems: Iterable[Problem], rows: Iterable[int]) -> list[Problem]:
    """Returns the distinct problems for each number of rows."""
    counts = [*rows]
    all_rows = (replace(problem, m=m) for problem in problems for m in counts)
    return [*dict.fromkeys(all_rows)]


def _multiplied(model: nn.Module) -> Iterator[nn.Module]:
    tied = getattr(getattr(model, "args", None), "tie_word_embeddings", False)
    classes = (nn.QuantizedLinear, *[nn.QuantizedEmbedding] * bool(tied))
    for _, layer in model.named_modules():
        if isinstance(layer, classes):
            yield layer


def _is_supported(layer: nn.Module) -> bool:
    format = FORMATS.get((layer.mode, layer.bits))
    return (
        format is not None
        and layer.group_size in format.group_sizes
        and _columns(layer) % format.k_multiple(layer.group_size) == 0
        and dtype_name(layer.scales.dtype) in format.scale_dtypes
    )


def _columns(layer: nn.Module) -> int:
    return int(layer.scales.shape[1]) * int(layer.group_size)


def _problem(layer: nn.Module, layout: str, activations: str) -> Problem:
    scales = dtype_name(layer.scales.dtype)
    # The weight of a tied head is not packed, because the embedding reads rows of it.
    is_table = isinstance(layer, nn.QuantizedEmbedding)
    return Problem(
        m=1,
        n=layer.scales.shape[0],
        k=_columns(layer),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=scales if scales in DTYPE_BYTES else activations,
        scale_dtype=scales,
        layout="mlx" if is_table else layout,
    )
