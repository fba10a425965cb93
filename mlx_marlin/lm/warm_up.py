"""Compiles and checks the kernels of a model before its first call."""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_marlin import state
from mlx_marlin.backends import children, kernels, selection
from mlx_marlin.layers.joined import whole
from mlx_marlin.lm.report.layer_uses import LayerUse, Target, uses_of
from mlx_marlin.progress import Stages, shown

Step = Callable[[], Any]

COMPILED_AT_A_TIME = 16
"""Most kernels that are compiled at a time."""


def check_rows(rows: Sequence[int]) -> None:
    """Raises ValueError if `rows` is not a sequence of positive integers."""
    listed = isinstance(rows, Iterable) and not isinstance(rows, str)
    if not listed or not all(type(m) is int and m > 0 for m in rows):
        raise ValueError(
            f"warm_up={rows!r}, expected numbers of rows such as (1, 4, 8)"
        )


def run_once(model: nn.Module, rows: Sequence[int]) -> None:
    """Runs a model once for each number of rows, with a progress bar.

    A model of mlx-lm is called with m tokens of one stream, and with one token of m
    streams. Of any other module, the converted layers are called one by one.
    """
    if not rows:
        return
    if selection.traits().compiles_ahead:
        compile_steps(step for m in rows for step in _steps(model, m))
    for m in shown(rows, "warm up", "row count"):
        for step in _steps(model, m):
            mx.eval(step())


def compile_steps(steps: Iterable[Step], stages: Stages | None = None) -> None:
    """Compiles the kernels of calls that are not stored yet, several at a time.

    An interrupt ends the processes that compile.
    """
    with kernels.deferred() as compilations:
        for step in steps:
            step()
    state.reset()  # what was decided in that context was not checked
    if not compilations:
        return
    workers = min(len(compilations), os.cpu_count() or 1, COMPILED_AT_A_TIME)
    pool = ThreadPoolExecutor(workers)
    try:
        with nullcontext(stages) if stages else Stages("kernel") as bar:
            bar.expect(len(compilations))
            running = [pool.submit(task) for task in compilations.values()]
            for count, done in enumerate(as_completed(running)):
                bar.say(f"compiling our kernels, {count + 1} of {len(running)}")
                done.result()
                bar.step()
    except BaseException:
        children.end_all()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


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
    """Yields the call of each distinct product of the converted layers."""
    uses = {replace(use, paths=()): use for use in uses_of(model, Target.of(None))}
    for use in uses.values():
        if use.is_converted and use.request is not None:
            yield partial(_call, whole(use.layers[0]), use, m)


def _call(layer: Any, use: LayerUse, m: int) -> Any:
    """Calls a layer with m rows.

    A layer of experts does not know how many experts a row chooses; this uses one.
    """
    request = use.at(m)
    x = mx.zeros((m, request.x_shape[-1]), request.x_dtype)
    match use.operation:
        case "experts":
            return layer(x[:, None, None], mx.zeros((m, 1), mx.uint32))
        case "as_linear":
            return layer.as_linear(x)
        case "linear":
            parts = request.epilogue.parts
            return layer.parts(x, parts) if parts else layer(x)
        case _:
            heads = mx.broadcast_to(x, (*use.batch, *x.shape))
            return layer(heads, request.transpose)
