"""Builds and checks the kernels that a model needs, so that no later call waits."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.integrations.mlx_lm.known_layers import (
    is_marlin_experts,
    is_marlin_heads,
)
from mlx_marlin.layers.embedding import MarlinEmbedding
from mlx_marlin.layers.joined import MarlinPart
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.layers.native import activation_dtype

Step = Callable[[], Any]


def check_rows(rows: Sequence[int]) -> None:
    """Raises a ValueError if `rows` are not numbers of rows."""
    if isinstance(rows, str) or not all(type(m) is int and m > 0 for m in rows):
        raise ValueError(
            f"warm_up={rows!r}, expected numbers of rows such as (1, 4, 8)"
        )


def run_once(model: nn.Module, rows: Sequence[int]) -> None:
    """Runs a model once for each number of rows, with a progress bar.

    A model of mlx-lm runs whole, with m tokens of one stream and with one token of m
    streams. Of any other module each layer that `optimize` converts runs alone, and
    joined layers together.

    Args:
        model: The converted model.
        rows: Rows at a time.
    """
    if not rows:
        return
    from tqdm import tqdm

    with tqdm(total=len(rows), desc="warm up", unit="row count") as bar:
        for m in rows:
            for step in _steps(model, m):
                mx.eval(step())
            bar.update()


def _steps(model: nn.Module, m: int) -> Iterator[Step]:
    """Yields what to compute for m rows."""
    make_cache = _cache_of(model)
    if make_cache is None:
        yield from _layers(model, m)
        return
    for shape in {(1, m), (m, 1)}:
        tokens = mx.zeros(shape, mx.int32)
        yield partial(_run_model, model, tokens, make_cache)


def _run_model(
    model: nn.Module, tokens: mx.array, make_cache: Callable[[], Any]
) -> mx.array:
    y: mx.array = model(tokens, cache=make_cache())
    return y


def _cache_of(model: nn.Module) -> Callable[[], Any] | None:
    """Returns what makes a cache for mlx-lm's models; None for other modules."""
    if "cache" not in inspect.signature(type(model).__call__).parameters:
        return None
    try:
        from mlx_lm.models.cache import make_prompt_cache

        make_prompt_cache(model)
    except Exception:  # another mlx-lm, or something that only looks like its models
        return None
    return partial(make_prompt_cache, model)


def _layers(model: nn.Module, m: int) -> Iterator[Step]:
    """Yields the products of our layers, once for each shape, format and dtype."""
    activations = activation_dtype(model)
    seen: set[object] = set()
    for layer in model.modules():
        sizes = layer.shared.sizes if isinstance(layer, MarlinPart) else ()
        whole = layer.shared.layer if isinstance(layer, MarlinPart) else layer
        if not _is_ours(whole):
            continue
        dtype = _scales(whole).dtype
        dtype = activations if dtype == mx.uint8 else dtype
        kind = _kind(whole), sizes, dtype
        if kind not in seen:
            seen.add(kind)
            yield from _products(whole, m, dtype, sizes)


def _is_ours(layer: nn.Module) -> bool:
    ours = isinstance(layer, MarlinLinear | MarlinEmbedding)
    return ours or is_marlin_experts(layer) or is_marlin_heads(layer)


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Returns all that decides how a layer multiplies rows of a dtype."""
    arrays = [(name, each.shape, each.dtype) for name, each in layer.items()]
    format = layer.group_size, layer.bits, layer.mode
    invariant = getattr(layer, "invariant", False)
    return type(layer), *format, invariant, *arrays


def _products(
    layer: Any, m: int, dtype: mx.Dtype, sizes: tuple[int, ...]
) -> Iterator[Step]:
    """Yields the products of m rows by a layer, joined of parts of these sizes if any.

    A layer of experts does not tell how many of them a row chooses: it is one here.
    """
    packed = getattr(layer, "packed", None)
    k = _scales(layer).shape[-1] * layer.group_size if packed is None else packed.k
    x = mx.zeros((m, k), dtype)
    if sizes:
        yield partial(layer.parts, x, sizes)
    elif isinstance(layer, MarlinEmbedding):
        yield partial(layer.as_linear, x)
    elif is_marlin_experts(layer):
        yield partial(layer, x[:, None, None], mx.zeros((m, 1), mx.uint32))
    elif is_marlin_heads(layer):
        heads = _scales(layer).shape[0]
        n = _scales(layer).shape[-2] if packed is None else packed.n
        yield partial(layer, mx.zeros((heads, m, k), dtype))
        yield partial(layer, mx.zeros((heads, m, n), dtype), transpose=False)
    else:
        yield partial(layer, x)


def _scales(layer: nn.Module) -> mx.array:
    scales: mx.array = layer["scales" if "scales" in layer else "quantizers"]
    return scales
