"""The products that a model's quantized layers ask for."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.nn as nn

from mlx_marlin.layers.native import activation_dtype
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.formats import DTYPE_BYTES, FORMATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a model's quantized layers are.

    Attributes:
        problems: One row of each product that is ours, each once.
        others: How many quantized layers are in formats that our kernels do not read.
    """

    problems: tuple[Problem, ...]
    others: int


def find(model: nn.Module, layouts: Sequence[str] = ("mlx",)) -> Found:
    """Returns the products of a model's quantized linear layers.

    An embedding counts where the model multiplies by it: a tied output head.

    Args:
        model: An mlx-lm model or any other, whose weights need not be there yet.
        layouts: In which our kernels are to read the weights.
    """
    layers = [*_multiplied(model)]
    ours = [layer for layer in layers if _is_ours(layer)]
    dtype = dtype_name(activation_dtype(model))
    problems = dict.fromkeys(
        _problem(layer, layout, dtype) for layer in ours for layout in layouts
    )
    return Found(problems=tuple(problems), others=len(layers) - len(ours))


def with_rows(problems: Iterable[Problem], rows: Iterable[int]) -> list[Problem]:
    """Returns the problems with each number of rows, each once."""
    counts = [*rows]
    several = (replace(each, m=m) for each in problems for m in counts)
    return [*dict.fromkeys(several)]


def _multiplied(model: nn.Module) -> Iterator[nn.Module]:
    tied = getattr(getattr(model, "args", None), "tie_word_embeddings", False)
    kinds = (nn.QuantizedLinear, *[nn.QuantizedEmbedding] * bool(tied))
    for _, layer in model.named_modules():
        if isinstance(layer, kinds):
            yield layer


def _is_ours(layer: nn.Module) -> bool:
    known = FORMATS.get((layer.mode, layer.bits))
    return (
        known is not None
        and layer.group_size in known.group_sizes
        and _columns(layer) % known.k_multiple(layer.group_size) == 0
        and dtype_name(layer.scales.dtype) in known.scale_dtypes
    )


def _columns(layer: nn.Module) -> int:
    return int(layer.scales.shape[1]) * int(layer.group_size)


def _problem(layer: nn.Module, layout: str, activations: str) -> Problem:
    scales = dtype_name(layer.scales.dtype)
    # A tied head's weight is not packed: the look-up needs it as it is.
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
