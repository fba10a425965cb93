"""Arrays for drawn problems: operands, weights as kernels take them, and launches."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_marlin.backends import graph, selection
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products.packing import pack
from support import format_cases, oracles

Native = tuple[mx.array, mx.array, mx.array]
"""Codes, scales and biases in MLX's layout."""


def arrays(problem: Problem, *, seed: int) -> tuple[mx.array, Native]:
    """Makes activations and a weight that MLX quantizes, for an affine problem.

    Groups of every kind occur: ordinary, constant (MLX's scale is then -1e-7) and of
    one sign; about half of MLX's scales are negative.
    """
    key = mx.random.key(seed)
    dtype = getattr(mx, problem.dtype)
    several = problem.result_shape[:-2]
    x = mx.random.normal((*several, problem.m, problem.k), key=key).astype(dtype)
    keys = mx.random.split(key, 2)
    w = mx.random.normal((*several, problem.n, problem.k), key=keys[0]) * 0.05
    groups = w.reshape(*several, problem.n, -1, problem.group_size)
    kind = mx.random.randint(0, 8, groups.shape[:-1], key=keys[1])[..., None]
    groups = mx.where(kind == 0, 0.125, mx.where(kind == 1, mx.abs(groups), groups))
    weight = groups.reshape(w.shape).astype(getattr(mx, problem.scale_dtype))
    native = mx.quantize(weight, group_size=problem.group_size, bits=problem.bits)
    mx.eval(x, native)
    return x, (native[0], native[1], native[2])


def stored(problem: Problem, native: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    """Returns a weight, or a batch of them, as kernels take it."""
    if problem.layout == "mlx":
        return native if len(native) == 3 else (*native, native[1])
    options: dict[str, Any] = {
        "group_size": problem.group_size,
        "bits": problem.bits,
        "mode": problem.mode,
    }
    if problem.format.has_codebook:
        options["codebook"] = mx.array(format_cases.NUMBERS)
    if native[0].ndim == 2:
        alone = pack(*native, **options)
        return alone.words, alone.scales, alone.scales
    packed = [
        pack(*(part[i] for part in native), **options) for i in range(problem.batch)
    ]
    scales = mx.stack([each.scales for each in packed])
    return mx.stack([each.words for each in packed]), scales, scales


def weight_of(problem: Problem, *, seed: int) -> format_cases.Weight:
    """Makes a weight of a problem's format, whatever that is."""
    weight = format_cases.any_weight(
        problem.mode,
        problem.bits,
        problem.group_size,
        problem.n,
        problem.k,
        dtype=problem.scale_dtype,
        seed=seed,
    )
    scale = mx.array(format_cases.GLOBAL_SCALE) if problem.global_scale else None
    return replace(weight, global_scale=scale)


def finish_arrays(problem: Problem, *, seed: int) -> Native:
    """Makes an epilogue's bias, multiplier and residual."""
    dtype = getattr(mx, problem.dtype)
    keys = mx.random.split(mx.random.key(seed), 3)
    result = problem.result_shape
    bias, multiplier, residual = (
        mx.random.normal(shape, key=key).astype(dtype)
        for shape, key in zip((result[-1:], result, result), keys, strict=True)
    )
    mx.eval(bias, multiplier, residual)
    return bias, multiplier, residual


def shifted(array: mx.array, offset: int) -> mx.array:
    """Returns a view of a copy that begins so many elements into its buffer."""
    if not offset:
        return array
    padding = mx.zeros(offset, array.dtype)
    return mx.concatenate([padding, array.flatten()])[offset:].reshape(array.shape)


def integer_arrays(problem: Problem) -> tuple[mx.array, Native, oracles.Floats]:
    """Returns operands of small integers, and their product, exact in float32.

    Scales are whole sixteenths where a dtype of 16 bits is stored.
    """
    draw = np.random.default_rng(problem.n)
    *several, m, _ = problem.result_shape
    x = mx.array(draw.integers(-8, 9, (*several, m, problem.k)), mx.float32)
    _, (w, *_) = arrays(problem, seed=1)
    unit = 1 if problem.scale_dtype == "float32" else 1 / 16
    shape = (*several, problem.n, problem.groups)
    scales, biases = (
        mx.array(draw.integers(-most, most + 1, shape) * unit, mx.float32).astype(
            getattr(mx, problem.scale_dtype)
        )
        for most in (4, 8)
    )
    expected = oracles.product(x, w, scales, biases, group_size=problem.group_size)
    return x.astype(getattr(mx, problem.dtype)), (w, scales, biases), expected


def another_schedule(
    seed: int, *, trace: bool = False
) -> AbstractContextManager[object]:
    """Makes the emulator run threadgroups in another order; elsewhere does nothing."""
    if selection.backend() != "emulator":
        return nullcontext()
    import metal_emulator

    workers = None if trace else 1 + seed % 3
    return metal_emulator.emulated(seed=seed, workers=workers, trace=trace)


def run(
    plan: Plan, x: mx.array, native: tuple[mx.array, ...], *finish: mx.array
) -> mx.array:
    """Returns the result of a plan; weights are packed first if it needs that."""
    operands = finish if plan.problem.epilogue != PLAIN else ()
    y = graph.product(plan)(x, *stored(plan.problem, native), *operands)
    mx.eval(y)
    return y


def stock(plan: Plan, x: mx.array, native: Native) -> mx.array:
    """Returns what stock MLX computes for a plan's problem."""
    problem = plan.problem
    return mx.quantized_matmul(
        x, *native, group_size=problem.group_size, bits=problem.bits
    )
