"""Known answers of the kernels of a decoder block that are no products."""

import mlx.core as mx

from mlx_marlin.backends.blocks import launch
from mlx_marlin.guard import reference
from mlx_marlin.guard.answers import (
    OF_FUNCTIONS,
    Answer,
    EpilogueArrays,
    norm_factor,
    rounding,
    wide,
)
from mlx_marlin.guard.heads import FAR, rotated
from mlx_marlin.planning.epilogue import Heads
from mlx_marlin.weights.dtypes import dtype_name

STREAMS = (2, 8)
"""MLX passes fewer than eight positions in another address space, for which the kernel
is compiled again."""
ROWS = 3
FIRST = 37
"""Position of the first token."""


def fault_of_rotation(
    heads: Heads, dtype: mx.Dtype, tokens: int, per_stream: bool
) -> str | None:
    """Returns how the kernel that rotates heads differs from its answer, or None.

    Args:
        heads: The heads.
        dtype: Dtype of the heads.
        tokens: New tokens of a stream.
        per_stream: Whether each stream has its own position.
    """
    counts = STREAMS if per_stream else STREAMS[:1]
    faults = (
        _rotation_fault(heads, dtype, (streams, tokens), per_stream)
        for streams in counts
    )
    return next(filter(None, faults), None)


def _rotation_fault(
    heads: Heads, dtype: mx.Dtype, rows: tuple[int, int], per_stream: bool
) -> str | None:
    streams, tokens = rows
    features = heads.features
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(0), 2)
        qkv = mx.random.normal((*rows, heads.columns), key=keys[0])
        norms = mx.random.uniform(0.5, 2, (2, features), key=keys[1]).astype(dtype)
        weights = () if heads.norm is None else (norms[0] + 0, norms[1] + 0)
        qkv = qkv.astype(dtype)
        freqs = mx.power(100.0, mx.arange(0, features, 2) / features)
        first = FIRST - 5 * mx.arange(streams if per_stream else 1, dtype=mx.int32)
        first[-1] = FAR
        mx.eval(qkv, freqs, first, *weights)
    results = launch.rotate_heads(heads, qkv, first, freqs, weights)
    with mx.stream(mx.cpu):
        points = wide(qkv).reshape(streams * tokens, -1)[:, : heads.rotated_columns]
        positions = (first[:, None] + mx.arange(tokens)) + mx.zeros((streams, 1))
        arrays = EpilogueArrays(
            positions=positions.flatten(), freqs=freqs, head_norms=weights
        )
        answer = rotated(Answer(points, mx.zeros_like(points)), heads.rotation, arrays)
        off = answer.bound + mx.abs(answer.values) * OF_FUNCTIONS
        off = off + rounding(answer.values, dtype_name(dtype))
        parts = [_by_streams(array, heads, rows) for array in (answer.values, off)]
    faults = map(reference.difference, results, map(Answer, *parts))
    return next(filter(None, faults), None)


def _by_streams(array: mx.array, heads: Heads, rows: tuple[int, int]) -> list[mx.array]:
    """Returns q and k [streams, heads, tokens, features] of rows [rows, heads, ...]."""
    array = array.reshape(*rows, -1, heads.features).transpose(0, 2, 1, 3)
    q, k = mx.split(array, [heads.heads], axis=1)
    return [q, k]


def fault_of_add_norm(dtype: mx.Dtype, n: int, epsilon: float) -> str | None:
    """Returns how the kernel that adds and normalizes rows differs, or None.

    Args:
        dtype: Dtype of the rows.
        n: Values of a row.
        epsilon: Epsilon of the norm.
    """
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(0), 3)
        x, y = (mx.random.normal((ROWS, n), key=key).astype(dtype) for key in keys[:2])
        weight = mx.random.uniform(0.5, 2, (n,), key=keys[2]).astype(dtype)
        mx.eval(x, y, weight)
    total, normed = launch.add_norm(x, y, weight, epsilon)
    mx.eval(total, normed)
    with mx.stream(mx.cpu):
        values, name = wide(x) + wide(y), dtype_name(dtype)
        fault = reference.difference(total, Answer(values, rounding(values, name)))
        rows = wide(total)
        values = rows * norm_factor(rows, epsilon) * wide(weight)
        bound = mx.abs(values) * OF_FUNCTIONS + rounding(values, name)
    return fault or reference.difference(normed, Answer(values, bound))
