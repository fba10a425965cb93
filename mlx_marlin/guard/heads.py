"""Known answers of rotated heads: RMSNorm, rotation and scale, in float64."""

import mlx.core as mx

from mlx_marlin.guard.answers import (
    OF_ANGLES,
    OF_FUNCTIONS,
    Answer,
    EpilogueArrays,
    norm_factor,
    wide,
)
from mlx_marlin.planning.epilogue import Rotation

FAR = 70_003
"""A position that 16 bits do not hold, as long contexts have."""


def rotated(total: Answer, rotation: Rotation, arrays: EpilogueArrays) -> Answer:
    """Returns the rotated heads [m, heads, 1, features] of a product [m, n]."""
    rotating, others = _split_heads(total, rotation.features, rotation.columns)
    if rotation.norm is not None:
        both = _split_heads(rotating, rotation.features, rotation.queries)
        normed = [
            _normalized_heads(heads, weight, rotation.norm)
            for heads, weight in zip(both, arrays.head_norms, strict=True)
        ]
        rotating = _joined(normed, axis=1)
    heads = _rotate(rotating, arrays)
    factor = rotation.factor
    heads = Answer(heads.values * factor, heads.bound * factor)
    return _joined([heads, others], axis=1)


def _normalized_heads(heads: Answer, weight: mx.array, epsilon: float) -> Answer:
    """Returns normalized heads; the bound includes the error of the factor."""
    factor = norm_factor(heads.values, epsilon)
    of_factor = mx.sqrt(mx.square(heads.bound).mean(-1, keepdims=True)) * factor
    off = heads.bound + mx.abs(heads.values) * (of_factor + OF_FUNCTIONS)
    values = heads.values * factor * wide(weight)
    return Answer(values, off * factor * mx.abs(wide(weight)))


def _split_heads(total: Answer, features: int, columns: int) -> tuple[Answer, Answer]:
    """Returns the heads of the first columns, and the others."""
    ends = [columns // features]
    values, bounds = (
        mx.split(array.reshape(len(array), -1, 1, features), ends, axis=1)
        for array in (total.values, total.bound)
    )
    return Answer(values[0], bounds[0]), Answer(values[1], bounds[1])


def _joined(answers: list[Answer], axis: int) -> Answer:
    values = mx.concatenate([answer.values for answer in answers], axis=axis)
    bounds = mx.concatenate([answer.bound for answer in answers], axis=axis)
    return Answer(values, bounds)


def _rotate(heads: Answer, arrays: EpilogueArrays) -> Answer:
    assert arrays.positions is not None
    assert arrays.freqs is not None
    first, second = mx.split(heads.values, 2, axis=-1)
    off_first, off_second = mx.split(heads.bound, 2, axis=-1)
    angles = wide(arrays.positions)[:, None, None, None] / wide(arrays.freqs)
    sine, cosine = mx.sin(angles), mx.cos(angles)
    off = (mx.abs(first) + mx.abs(second)) * (1 + mx.abs(angles)) * OF_ANGLES
    c, s = mx.abs(cosine), mx.abs(sine)
    halves = [
        Answer(first * cosine - second * sine, off_first * c + off_second * s + off),
        Answer(first * sine + second * cosine, off_first * s + off_second * c + off),
    ]
    return _joined(halves, axis=-1)
