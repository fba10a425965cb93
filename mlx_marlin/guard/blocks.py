"""Known answers of the kernels of a decoder block that are no products."""

from dataclasses import replace

import mlx.core as mx

from mlx_marlin.backends import launcher
from mlx_marlin.guard import reference
from mlx_marlin.guard.answers import (
    OF_FUNCTIONS,
    Answer,
    EpilogueArrays,
    evaluate,
    norm_factor,
    rounding,
    running,
    wide,
)
from mlx_marlin.guard.heads import FAR, rotated
from mlx_marlin.planning.block_plans import AddNormPlan, HeadsPlan
from mlx_marlin.planning.epilogue import Heads
from mlx_marlin.weights import dtypes

STREAMS = (2, 8)
"""MLX passes fewer than eight positions in another address space, for which the kernel
is compiled again."""
ROWS = 3
FIRST = 37
"""Position of the first token."""


def fault_of_rotation(plan: HeadsPlan) -> str | None:
    """Returns how the kernel that rotates heads differs from its answer, or None."""
    counts = STREAMS if plan.per_stream else STREAMS[:1]
    faults = (_rotation_fault(replace(plan, streams=count)) for count in counts)
    return next(filter(None, faults), None)


def _rotation_fault(plan: HeadsPlan) -> str | None:
    heads, dtype = plan.heads, dtypes.dtype(plan.dtype)
    streams, tokens = rows = plan.streams, plan.tokens
    features = heads.features
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(0), 2)
        qkv = mx.random.normal((*rows, heads.columns), key=keys[0])
        norms = mx.random.uniform(0.5, 2, (2, features), key=keys[1]).astype(dtype)
        weights = () if heads.norm is None else (norms[0] + 0, norms[1] + 0)
        qkv = qkv.astype(dtype)
        freqs = mx.power(100.0, mx.arange(0, features, 2) / features)
        count = streams if plan.per_stream else 1
        first = FIRST - 5 * mx.arange(count)
        first[-1] = FAR
        mx.eval(qkv, freqs, first, *weights)
    with running():
        results = launcher.call(plan)(qkv, first, freqs, *weights)
    with mx.stream(mx.cpu):
        points = wide(qkv).reshape(streams * tokens, -1)[:, : heads.rotated_columns]
        positions = (first[:, None] + mx.arange(tokens)) + mx.zeros((streams, 1))
        arrays = EpilogueArrays(
            positions=positions.flatten(), freqs=freqs, head_norms=weights
        )
        answer = rotated(Answer(points, mx.zeros_like(points)), heads.rotation, arrays)
        off = answer.bound + mx.abs(answer.values) * OF_FUNCTIONS
        off = off + rounding(answer.values, plan.dtype)
        parts = [_by_streams(array, heads, rows) for array in (answer.values, off)]
    faults = map(reference.difference, results, map(Answer, *parts))
    return next(filter(None, faults), None)


def _by_streams(array: mx.array, heads: Heads, rows: tuple[int, int]) -> list[mx.array]:
    """Returns q and k [streams, heads, tokens, features] of rows [rows, heads, ...]."""
    array = array.reshape(*rows, -1, heads.features).transpose(0, 2, 1, 3)
    q, k = mx.split(array, [heads.heads], axis=1)
    return [q, k]


def fault_of_add_norm(plan: AddNormPlan) -> str | None:
    """Returns how the kernel that adds and normalizes rows differs, or None."""
    n, dtype, epsilon = plan.n, dtypes.dtype(plan.dtype), plan.epsilon
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(0), 3)
        x, y = (mx.random.normal((ROWS, n), key=key).astype(dtype) for key in keys[:2])
        weight = mx.random.uniform(0.5, 2, (n,), key=keys[2]).astype(dtype)
        mx.eval(x, y, weight)
    with running():
        total, normed = launcher.call(replace(plan, rows=ROWS))(x, y, weight)
    evaluate(total, normed)
    with mx.stream(mx.cpu):
        values, name = wide(x) + wide(y), plan.dtype
        answer = Answer(values, rounding(values, name))
    fault = reference.difference(total, answer)
    if fault is not None:
        return fault
    with mx.stream(mx.cpu):
        rows = wide(total)
        values = rows * norm_factor(rows, epsilon) * wide(weight)
        bound = mx.abs(values) * OF_FUNCTIONS + rounding(values, name)
    return reference.difference(normed, Answer(values, bound))
