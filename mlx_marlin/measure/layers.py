"""Finds the problems that a model's quantized layers pose."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

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


def _is_supported(layer: Any) -> bool:
    if getattr(layer, "layout", "mlx") == "marlin":
        return True
    format = FORMATS.get((layer.mode, layer.bits))
    k = int(layer.scales.shape[1]) * int(layer.group_size)
    return (
        format is not None
        and layer.group_size in format.group_sizes
        and k % format.k_multiple(layer.group_size) == 0
        and dtype_name(layer.scales.dtype) in format.scale_dtypes
    )


def _problem(layer: Any, layout: str, activations: str) -> Problem:
    packed = getattr(layer, "packed", None)
    if packed is None:
        n, groups = layer.scales.shape
        k, scales = groups * layer.group_size, dtype_name(layer.scales.dtype)
    else:  # reading the layer's scales would unpack the weight
        n, k, scales = packed.n, packed.k, dtype_name(packed.dtype)
    if isinstance(layer, nn.QuantizedEmbedding):
        # The weight of a tied head is not packed: the embedding reads rows of it.
        layout = "mlx"
    elif getattr(layer, "is_packed_only", False):
        layout = "marlin"
    return Problem(
        m=1,
        n=n,
        k=k,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=scales if scales in DTYPE_BYTES else activations,
        scale_dtype=scales,
        layout=layout,
        global_scale=packed is not None and packed.global_scale is not None,
    )
