"""What a product and its epilogue must give: float64, on the CPU, with error bounds.

Functions are written out instead of taken from `mlx.nn`, whose activations are compiled
functions and would need a C++ compiler.
"""

import math
from dataclasses import dataclass
from math import prod

import mlx.core as mx

from mlx_marlin.epilogue import Epilogue, Rotation
from mlx_marlin.guard.operands import DISTINCT_ROWS, Operands, factors
from mlx_marlin.problem import Problem

ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22}
"""Relative error of a result: two units in the last place."""
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126}
"""Absolute error below the normal numbers."""
OF_SUM = {"float16": 2.0**-15, "bfloat16": 2.0**-12, "float32": 2.0**-19}
"""Error of a float32 sum over the magnitudes that are added: room for the offset that
is added to codes and taken off again: 64 on Metal, up to 1024 on CUDA, which has no
float32."""
STEEPEST = 1.2
"""No activation of ours is steeper (silu 1.1, gelu 1.13)."""
OF_PAIRS = {"float16": 0.01, "bfloat16": 0.05}
"""Error of results that mix columns or normalize rows, over their root mean square."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A known answer: values in float64, and how far off each may be."""

    values: mx.array
    bound: mx.array


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Finish:
    """Arrays of an epilogue and of a norm, None where there are none.

    Attributes:
        bias: [n].
        multiply: Of the result's shape.
        residual: Likewise.
        positions: Of rows, int32 [m] or [1].
        freqs: Of a head's pairs, float32 [features / 2].
        head_norms: Weights [features] of the norms of q and k.
        norm: Weight [k] of the norm of rows.
    """

    bias: mx.array | None = None
    multiply: mx.array | None = None
    residual: mx.array | None = None
    positions: mx.array | None = None
    freqs: mx.array | None = None
    head_norms: tuple[mx.array, ...] = ()
    norm: mx.array | None = None


def product(problem: Problem, x: mx.array, weight: Operands, finish: Finish) -> Answer:
    """Returns the answer of a product with its epilogue.

    Args:
        problem: The product.
        x: Activations [m, k] or [batch, m, k], of `operands.activations`.
        weight: Likewise.
        finish: Arrays of the epilogue.
    """
    rows = wide(x)
    if problem.norm is None:
        total, off = sums(problem, rows, weight)
    else:
        assert finish.norm is not None
        rows = _normalized(rows, finish.norm, problem.norm)
        total = rows @ weight.exact.swapaxes(-1, -2)
        off = _error_of_sums(problem, rows, weight.magnitude)
    epilogue = problem.epilogue
    if epilogue.rotation is not None:
        total = total if finish.bias is None else total + wide(finish.bias)
        total = _rotated(total, epilogue.rotation, finish)
    elif epilogue.gated:
        gate, up = mx.split(total, 2, axis=-1)
        total = activated(epilogue.activation, gate) * up
    else:
        total, off = _finished(total, off, epilogue, finish)
    if epilogue.is_paired or problem.norm is not None:
        size = mx.sqrt(mx.square(total).mean())
        off = size * OF_PAIRS[problem.dtype] + rounding(total, problem.dtype)
        return Answer(total, off)
    return Answer(total, off + rounding(total, problem.dtype))


def difference(y: mx.array, answer: Answer) -> str | None:
    """Returns how a result differs from its answer; None if it does not.

    Args:
        y: The result; it is evaluated on the device where it was computed.
        answer: What it must be.
    """
    mx.async_eval(y)  # while the answer is computed on the CPU
    with mx.stream(mx.cpu):
        mx.eval(answer.values, answer.bound)
        mx.eval(y)
        if y.shape != answer.values.shape:
            return f"the result has shape {y.shape}, not {answer.values.shape}"
        off = mx.abs(wide(y) - answer.values)
        right = off <= answer.bound  # false of NaN
        if right.all().item():
            return None
        wrong = mx.logical_not(right).sum().item()
        worst = (off / mx.maximum(answer.bound, 1e-30)).max().item()
    return (
        f"{wrong} of {prod(y.shape)} results are wrong, by up to {worst:.3g} times "
        f"the allowed error"
    )


def sums(
    problem: Problem, rows: mx.array, weight: Operands
) -> tuple[mx.array, mx.array]:
    """Returns the products of rows with a weight [..., m, n], and how far off each is.

    Args:
        problem: The product.
        rows: Activations [..., m, k] in float64; most are multiples of the first, as
            `operands.activations` says.
        weight: The weight.
    """
    first, factor = rows[..., :DISTINCT_ROWS, :], factors(rows.shape[-2])[:, None]
    nth = mx.arange(rows.shape[-2]) % DISTINCT_ROWS
    total = first @ weight.exact.swapaxes(-1, -2)
    off = _error_of_sums(problem, first, weight.magnitude)
    return total[..., nth, :] * factor, off[..., nth, :] * mx.abs(factor)


def _error_of_sums(problem: Problem, rows: mx.array, magnitude: mx.array) -> mx.array:
    """Returns how far a float32 sum may be off, for each result.

    The sum of magnitudes is bounded by the product of two norms (Cauchy-Schwarz), which
    is less work than another product and, of what is drawn, less than twice as much.
    """
    of_rows, of_weights = (
        mx.sqrt(mx.square(each).sum(-1)) for each in (rows, magnitude)
    )
    sizes = of_rows[..., :, None] * of_weights[..., None, :]
    return sizes * OF_SUM[problem.dtype]


def rounding(values: mx.array, dtype: str) -> mx.array:
    """Returns how far values may be off that are rounded to a dtype."""
    return mx.abs(values) * ROUNDING[dtype] + SMALLEST[dtype]


def wide(array: mx.array) -> mx.array:
    """Returns an array in float64; the default device must be the CPU."""
    return array.astype(mx.float64)


def activated(name: str, y: mx.array) -> mx.array:
    """Returns an activation of `mlx.nn`, by its name, of float64."""
    if name == "silu":
        return y * mx.sigmoid(y)
    if name == "gelu":
        return y * (1 + mx.erf(y / math.sqrt(2))) / 2
    if name == "gelu_approx":
        inner = math.sqrt(2 / math.pi) * (y + 0.044715 * y * y * y)
        return 0.5 * y * (1 + mx.tanh(inner))
    return y


def _finished(
    total: mx.array, off: mx.array, epilogue: Epilogue, finish: Finish
) -> tuple[mx.array, mx.array]:
    total = total if finish.bias is None else total + wide(finish.bias)
    if epilogue.activation != "none":
        total, off = activated(epilogue.activation, total), off * STEEPEST
    if finish.multiply is not None:
        factor = wide(finish.multiply)
        total, off = total * factor, off * mx.abs(factor)
    # Functions and sums of the epilogue are float32.
    off = off + mx.abs(total) * 2.0**-18
    if finish.residual is not None:
        total = total + wide(finish.residual)
    return total, off


def _normalized(rows: mx.array, weight: mx.array, epsilon: float) -> mx.array:
    mean = mx.square(rows).mean(-1, keepdims=True)
    return rows / mx.sqrt(mean + epsilon) * wide(weight)


def _rotated(total: mx.array, rotation: Rotation, finish: Finish) -> mx.array:
    """Returns heads [m, heads, 1, features] of a product [m, n]."""
    assert finish.positions is not None
    assert finish.freqs is not None
    features = rotation.features
    heads = total.reshape(len(total), -1, 1, features)
    turned, others = mx.split(heads, [rotation.columns // features], axis=1)
    if rotation.norm is not None:
        both = mx.split(turned, [rotation.queries // features], axis=1)
        normed = zip(both, finish.head_norms, strict=True)
        turned = mx.concatenate(
            [_normalized(head, weight, rotation.norm) for head, weight in normed],
            axis=1,
        )
    turned = turned * rotation.factor
    first, second = mx.split(turned, 2, axis=-1)
    angles = wide(finish.positions)[:, None, None, None] / wide(finish.freqs)
    sine, cosine = mx.sin(angles), mx.cos(angles)
    return mx.concatenate(
        [
            mx.concatenate(
                [first * cosine - second * sine, first * sine + second * cosine],
                axis=-1,
            ),
            others,
        ],
        axis=1,
    )
