"""Compiles and checks the kernels of a model before its first call."""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin import state
from mlx_marlin.backends import kernels, selection
from mlx_marlin.layers.embedding import MarlinEmbedding
from mlx_marlin.layers.joined import MarlinPart, whole
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.layers.native import activation_dtype
from mlx_marlin.lm.known_layers import is_marlin_experts, is_marlin_heads
from mlx_marlin.weights.dtypes import floating

Step = Callable[[], Any]

COMPILED_AT_A_TIME = 16
"""Most kernels that are compiled at a time."""


def check_rows(rows: Sequence[int]) -> None:
    """Raises ValueError if `rows` is not a sequence of positive integers."""
    if isinstance(rows, str) or not all(type(m) is int and m > 0 for m in rows):
        raise ValueError(
            f"warm_up={rows!r}, expected numbers of rows such as (1, 4, 8)"
        )


def run_once(model: nn.Module, rows: Sequence[int]) -> None:
    """Runs a model once for each number of rows, with a progress bar.

    A model of mlx-lm is called with m tokens of one stream, and with one token of m
    streams. Of any other module, the converted layers are called one by one.

    Args:
        model: The converted model.
        rows: Numbers of rows m.
    """
    if not rows:
        return
    from tqdm import tqdm

    if selection.traits().compiles_ahead:
        compile_steps(step for m in rows for step in _steps(model, m))
    with tqdm(total=len(rows), desc="warm up", unit="row count") as bar:
        for m in rows:
            for step in _steps(model, m):
                mx.eval(step())
            bar.update()


def compile_steps(steps: Iterable[Step]) -> None:
    """Compiles the kernels of calls that are not stored yet, several at a time.

    Args:
        steps: The calls, whose results are not evaluated.
    """
    with kernels.deferred() as compilations:
        for step in steps:
            step()
    state.reset()  # what was decided in that context was not checked
    if not compilations:
        return
    from tqdm import tqdm

    workers = min(len(compilations), os.cpu_count() or 1, COMPILED_AT_A_TIME)
    with (
        ThreadPoolExecutor(workers) as pool,
        tqdm(total=len(compilations), desc="compile", unit="kernel") as bar,
    ):
        for done in as_completed([pool.submit(task) for task in compilations.values()]):
            done.result()
            bar.update()


def _steps(model: nn.Module, m: int) -> Iterator[Step]:
    """Yields the calls for m rows."""
    make_cache = cache_factory(model)
    if make_cache is None:
        yield from layer_steps(model, m)
        return
    for shape in {(1, m), (m, 1)}:
        tokens = mx.zeros(shape, mx.int32)
        yield partial(_run_model, model, tokens, make_cache)


def _run_model(
    model: nn.Module, tokens: mx.array, make_cache: Callable[[], Any]
) -> mx.array:
    y: mx.array = model(tokens, cache=make_cache())
    return y


def cache_factory(model: nn.Module) -> Callable[[], Any] | None:
    """Returns a function that makes a model's cache, or None if it has none."""
    if "cache" not in inspect.signature(type(model).__call__).parameters:
        return None
    try:
        from mlx_lm.models.cache import make_prompt_cache

        make_prompt_cache(model)
    except Exception:  # another version of mlx-lm, or not one of its models
        return None
    return partial(make_prompt_cache, model)


def layer_steps(model: nn.Module, m: int) -> Iterator[Step]:
    """Yields calls of converted layers, once for each shape, format and dtype."""
    activations = activation_dtype(model)
    seen: set[object] = set()
    for layer in model.modules():
        sizes = layer.shared.sizes if isinstance(layer, MarlinPart) else ()
        own = whole(layer)
        if not _is_converted(own):
            continue
        dtype = floating(_scales(own).dtype, activations)
        key = _kernel_key(own), sizes, dtype
        if key not in seen:
            seen.add(key)
            yield from _products(own, m, dtype, sizes)


def _is_converted(layer: nn.Module) -> bool:
    known = isinstance(layer, MarlinLinear | MarlinEmbedding)
    return known or is_marlin_experts(layer) or is_marlin_heads(layer)


def _kernel_key(layer: nn.Module) -> tuple[object, ...]:
    """Returns the properties of a layer that determine its kernels."""
    arrays = [(name, array.shape, array.dtype) for name, array in layer.items()]
    format = layer.group_size, layer.bits, layer.mode
    invariant = getattr(layer, "invariant", False)
    return type(layer), *format, invariant, *arrays


def _products(
    layer: Any, m: int, dtype: mx.Dtype, sizes: tuple[int, ...]
) -> Iterator[Step]:
    """Yields the calls of a layer with m rows.

    A layer of experts does not know how many experts a row chooses; this uses one.

    Args:
        layer: The layer.
        m: Number of rows.
        dtype: Dtype of the activations.
        sizes: Rows of the parts of a joined layer; empty for others.
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
    scales: mx.array = layer["scales" if "scales" in layer else "packed_scales"]
    return scales
