"""Builds and checks the kernels that a model needs, so that no later call waits."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin.layers.linear import MarlinLinear

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
    streams. Of any other module each of our linear layers runs alone.

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
    """Yields a product of each of our layers, once for each shape and format."""
    seen: set[object] = set()
    for layer in model.modules():
        if not isinstance(layer, MarlinLinear):
            continue
        kind = repr(layer), "bias" in layer
        if kind not in seen:
            seen.add(kind)
            yield partial(layer, _rows_of(layer, m))


def _rows_of(layer: MarlinLinear, m: int) -> mx.array:
    packed = layer.packed
    scales = layer["scales"] if packed is None else packed.scales
    dtype = scales.dtype if scales.dtype != mx.uint8 else mx.bfloat16
    k = packed.k if packed is not None else scales.shape[-1] * layer.group_size
    return mx.zeros((m, k), dtype)
