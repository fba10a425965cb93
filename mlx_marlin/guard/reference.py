"""What a product and its epilogue must give: float64, on the CPU, with error bounds.

Functions are written out instead of taken from `mlx.nn`, whose activations are compiled
functions and would need a C++ compiler.
"""

import math
from dataclasses import dataclass
from math import prod

import mlx.core as mx

from mlx_marlin.guard.operands import DISTINCT_ROWS, Operands, factors
from mlx_marlin.planning.epilogue import Epilogue, Rotation
from mlx_marlin.planning.problem import Problem

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
OF_FUNCTIONS = 2.0**-18
"""Relative error of functions and sums of the epilogue, which are float32."""
OF_ANGLES = 2.0**-20
"""Error of sines and cosines, and relative error of angles, likewise."""
OF_COMBINED = 2.0
"""Error of a sum that enters a result with others, over `OF_SUM`: weights of integers
are rounded to the dtype, and one sum in some thousands is off by a little more. A sum
that is stored alone hides that behind its own rounding."""
OF_NORMED_ROWS = 3.0
"""Error of a product over that of its rows, which are rounded when they are normalized.
Roundings are independent, so the error of a sum of k values is their root mean square
times the root of k, and a few times that is room enough."""


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
    total, off = _product(problem, wide(x), weight, finish)
    epilogue = problem.epilogue
    if epilogue.gated:
        gate, up = (
            Answer(*each)
            for each in zip(
                mx.split(total, 2, axis=-1), mx.split(off, 2, axis=-1), strict=True
            )
        )
        return rounded(problem, gated(epilogue.activation, gate, up))
    if epilogue.rotation is not None:
        total = total if finish.bias is None else total + wide(finish.bias)
        heads = Answer(total, off * OF_COMBINED)
        total, off = _rotated(heads, epilogue.rotation, finish)
    else:
        total, off = _finished(total, off, epilogue, finish)
    return rounded(problem, Answer(total, off))


def gated(activation: str, gate: Answer, up: Answer) -> Answer:
    """Returns the activation of one product times another, with its error.

    Args:
        activation: As for `activated`, and "swiglu_oai" for the clipped one of gpt-oss.
        gate: The product that goes through the activation, and how far off it may be.
        up: The other one.
    """
    if activation == "swiglu_oai":
        # Clipping moves no two numbers apart, so errors do not grow.
        own = mx.minimum(gate.values, 7)
        y, factor = own * mx.sigmoid(1.702 * own), mx.clip(up.values, -7, 7) + 1
    else:
        y, factor = activated(activation, gate.values), up.values
    off_y = gate.bound * OF_COMBINED * STEEPEST + mx.abs(y) * OF_FUNCTIONS
    off_up = up.bound * OF_COMBINED
    # Where both are near zero, the product of the errors is what counts.
    off = off_y * (mx.abs(factor) + off_up) + mx.abs(y) * off_up
    return Answer(y * factor, off)


def rounded(problem: Problem, answer: Answer) -> Answer:
    """Returns an answer whose bounds allow for the rounding to a problem's dtype."""
    off = answer.bound + rounding(answer.values, problem.dtype)
    return Answer(answer.values, off)


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
    return _sizes(rows, magnitude) * OF_SUM[problem.dtype]


def _sizes(rows: mx.array, magnitude: mx.array) -> mx.array:
    of_rows, of_weights = (
        mx.sqrt(mx.square(each).sum(-1)) for each in (rows, magnitude)
    )
    return of_rows[..., :, None] * of_weights[..., None, :]


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
    off = off + mx.abs(total) * OF_FUNCTIONS
    if finish.residual is not None:
        total = total + wide(finish.residual)
    return total, off


def _product(
    problem: Problem, rows: mx.array, weight: Operands, finish: Finish
) -> tuple[mx.array, mx.array]:
    """Returns the products of rows, normalized or not, and how far off each is."""
    if problem.norm is None:
        return sums(problem, rows, weight)
    assert finish.norm is not None
    rows = _normalized(rows, finish.norm, problem.norm)
    total = rows @ weight.exact.swapaxes(-1, -2)
    off = _error_of_sums(problem, rows, weight.magnitude)
    roundings = ROUNDING[problem.dtype] * OF_NORMED_ROWS / math.sqrt(problem.k)
    return total, off + _sizes(rows, weight.exact) * roundings


def _normalized(rows: mx.array, weight: mx.array, epsilon: float) -> mx.array:
    return rows * _factor(rows, epsilon) * wide(weight)


def _factor(rows: mx.array, epsilon: float) -> mx.array:
    """Returns what rows are multiplied by to have a mean square of one."""
    return mx.rsqrt(mx.square(rows).mean(-1, keepdims=True) + epsilon)


def _normalized_heads(heads: Answer, weight: mx.array, epsilon: float) -> Answer:
    """Returns normalized heads; the errors of a head make an error of its factor."""
    factor = _factor(heads.values, epsilon)
    of_factor = mx.sqrt(mx.square(heads.bound).mean(-1, keepdims=True)) * factor
    off = heads.bound + mx.abs(heads.values) * (of_factor + OF_FUNCTIONS)
    values = heads.values * factor * wide(weight)
    return Answer(values, off * factor * mx.abs(wide(weight)))


def _rotated(
    total: Answer, rotation: Rotation, finish: Finish
) -> tuple[mx.array, mx.array]:
    """Returns heads [m, heads, 1, features] of a product [m, n], and their errors."""
    turned, others = _split_heads(total, rotation.features, rotation.columns)
    if rotation.norm is not None:
        both = _split_heads(turned, rotation.features, rotation.queries)
        normed = [
            _normalized_heads(heads, weight, rotation.norm)
            for heads, weight in zip(both, finish.head_norms, strict=True)
        ]
        turned = _joined(normed, axis=1)
    turned = _turned(turned, finish)
    factor = rotation.factor
    turned = Answer(turned.values * factor, turned.bound * factor)
    whole = _joined([turned, others], axis=1)
    return whole.values, whole.bound


def _split_heads(total: Answer, features: int, columns: int) -> tuple[Answer, Answer]:
    """Returns the heads of the first columns, and the others."""

    ends = [columns // features]
    values, bounds = (
        mx.split(each.reshape(len(each), -1, 1, features), ends, axis=1)
        for each in (total.values, total.bound)
    )
    return Answer(values[0], bounds[0]), Answer(values[1], bounds[1])


def _joined(answers: list[Answer], axis: int) -> Answer:
    values = mx.concatenate([each.values for each in answers], axis=axis)
    return Answer(values, mx.concatenate([each.bound for each in answers], axis=axis))


def _turned(heads: Answer, finish: Finish) -> Answer:
    assert finish.positions is not None
    assert finish.freqs is not None
    first, second = mx.split(heads.values, 2, axis=-1)
    off_first, off_second = mx.split(heads.bound, 2, axis=-1)
    angles = wide(finish.positions)[:, None, None, None] / wide(finish.freqs)
    sine, cosine = mx.sin(angles), mx.cos(angles)
    off = (mx.abs(first) + mx.abs(second)) * (1 + mx.abs(angles)) * OF_ANGLES
    c, s = mx.abs(cosine), mx.abs(sine)
    return _joined(
        [
            Answer(
                first * cosine - second * sine, off_first * c + off_second * s + off
            ),
            Answer(
                first * sine + second * cosine, off_first * s + off_second * c + off
            ),
        ],
        axis=-1,
    )
