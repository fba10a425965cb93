"""Known answers of products and epilogues, computed in float64 on the CPU.

Activations are written out, because those of `mlx.nn` are compiled functions, which
need a C++ compiler.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import cast

import mlx.core as mx

from mlx_marlin.backends import kernels
from mlx_marlin.guard.operands import DISTINCT_ROWS, Operands, factors
from mlx_marlin.planning.epilogue import Epilogue, Rotation
from mlx_marlin.planning.problem import Problem

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
"""Relative error of rounding to nearest: half a unit in the last place. Truncation has
up to twice that."""
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126}
"""Absolute rounding error of subnormal results."""
OF_SUM = {"float16": 2.0**-15, "bfloat16": 2.0**-12, "float32": 2.0**-19}
"""Error of a float32 sum relative to the sum of magnitudes. It allows for the offset
that is added to codes and subtracted again: 64 on Metal, up to 1024 on CUDA, which does
not support float32."""
STEEPEST = 1.2
"""Upper bound of the slope of activations (silu 1.1, gelu 1.13)."""
OF_FUNCTIONS = 2.0**-18
"""Relative error of functions and sums of the epilogue, in float32."""
OF_ANGLES = 2.0**-20
"""Error of sines and cosines, and relative error of angles, in float32."""
OF_COMBINED = 2.0
"""Factor on `OF_SUM` for sums that are combined before they are stored. Weights of
integer codes are rounded to the dtype, so one sum in some thousands exceeds `OF_SUM`; a
sum that is stored directly hides that in its own rounding."""
OF_NORMED_ROWS = 3.0
"""Factor on the error that results from rounding normalized rows. Roundings are
independent, so the error of a sum of k values is their root mean square times the root
of k; a few times that is a safe bound."""


class KernelError(Exception):
    """Building, calling or evaluating a kernel has raised the error that caused it."""


@contextmanager
def running() -> Iterator[None]:
    """Attributes what is raised inside to the kernel, and not to its check."""
    try:
        yield
    except Exception as error:  # of a compiler, a driver or MLX
        raise KernelError from error


def evaluate(*arrays: mx.array) -> None:
    """Evaluates results of kernels and nothing else: what began before has ended."""
    mx.synchronize()
    with running(), kernels.evaluation():
        mx.eval(*arrays)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A known answer: values in float64, and a bound of the error of each."""

    values: mx.array
    bound: mx.array


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EpilogueArrays:
    """Operands of an epilogue and of an RMSNorm; None if absent."""

    bias: mx.array | None = None  # [n]
    multiply: mx.array | None = None  # Array of the result's shape
    residual: mx.array | None = None  # Array of the result's shape
    positions: mx.array | None = None  # Positions of rows, int32 [m] or [1]
    freqs: mx.array | None = None  # As in `mx.fast.rope`, float32 [features / 2]
    head_norms: tuple[mx.array, ...] = ()  # RMSNorm weights [features] of q and k
    norm: mx.array | None = None  # RMSNorm weight [k] of the rows of x


def rounding(values: mx.array, dtype: str) -> mx.array:
    """Returns the error bound of rounding values to a dtype."""
    return mx.abs(values) * ROUNDING[dtype] + SMALLEST[dtype]


def wide(array: mx.array) -> mx.array:
    """Returns an array as float64; the default device must be the CPU."""
    return array.astype(mx.float64)


def norm_factor(rows: mx.array, epsilon: float) -> mx.array:
    """Returns the factor of RMSNorm for each row, without the weight."""
    return mx.rsqrt(mx.square(rows).mean(-1, keepdims=True) + epsilon)


BIASED = ("float16", "bfloat16")
"""Dtypes to which sums in float32 are rounded."""
FEWEST = 64
"""Number of results from which their mean error says something."""
MOST_BIAS = 0.35
"""Largest mean error, in errors of rounding: cutting off gives about 0.7."""


def product(
    problem: Problem, x: mx.array, weight: Operands, arrays: EpilogueArrays
) -> Answer:
    """Returns the answer of a product of [m, k] or [batch, m, k] with its epilogue."""
    total, off = _product(problem, wide(x), weight, arrays)
    epilogue = problem.epilogue
    if epilogue.gated:
        values, bounds = mx.split(total, 2, axis=-1), mx.split(off, 2, axis=-1)
        gate, up = Answer(values[0], bounds[0]), Answer(values[1], bounds[1])
        return rounded(problem, gated(epilogue.activation, gate, up))
    if epilogue.rotation is not None:
        total = total if arrays.bias is None else total + wide(arrays.bias)
        heads = Answer(total, off * OF_COMBINED)
        return rounded(problem, rotated(heads, epilogue.rotation, arrays))
    return rounded(problem, _with_epilogue(Answer(total, off), epilogue, arrays))


def gated(activation: str, gate: Answer, up: Answer) -> Answer:
    """Returns the activation of one product times another product."""
    if activation == "swiglu_oai":
        # Clipping does not increase errors.
        clipped = mx.minimum(gate.values, 7)
        y, factor = clipped * mx.sigmoid(1.702 * clipped), mx.clip(up.values, -7, 7) + 1
    else:
        y, factor = activated(activation, gate.values), up.values
    off_y = gate.bound * OF_COMBINED * STEEPEST + mx.abs(y) * OF_FUNCTIONS
    off_up = up.bound * OF_COMBINED
    # If both values are near zero, the product of the errors dominates.
    off = off_y * (mx.abs(factor) + off_up) + mx.abs(y) * off_up
    return Answer(y * factor, off)


def rounded(problem: Problem, answer: Answer) -> Answer:
    """Returns an answer whose bounds include the rounding to the problem's dtype."""
    off = answer.bound + rounding(answer.values, problem.dtype)
    return Answer(answer.values, off)


def difference(y: mx.array, answer: Answer) -> str | None:
    """Returns how a result exceeds the error bounds of its answer, or None."""
    evaluate(y)
    with mx.stream(mx.cpu):
        if y.shape != answer.values.shape:
            return f"the result has shape {y.shape}, not {answer.values.shape}"
        off = mx.abs(wide(y) - answer.values)
        right = off <= answer.bound  # False for NaN
        if right.all().item():
            return _bias(y, answer.values)
        wrong = mx.logical_not(right).sum().item()
        worst = (off / mx.maximum(answer.bound, 1e-30)).max().item()
    return (
        f"{wrong} of {prod(y.shape)} results are wrong, by up to {worst:.3g} times "
        f"the allowed error"
    )


def _bias(y: mx.array, values: mx.array) -> str | None:
    """Returns how results are smaller or larger than their values on average, or None.

    Errors of rounding and of sums have both signs; those of cutting off have one. The
    bound of a single result, which includes the error of its sum, does not tell them
    apart. The default device must be the CPU.
    """
    dtype = str(y.dtype).rpartition(".")[2]
    if dtype not in BIASED:
        return None
    least = SMALLEST[dtype] / ROUNDING[dtype]  # of subnormal results
    size = mx.abs(values)
    normal = size > least
    count = cast(int, normal.sum().item())
    if count < FEWEST:
        return None
    errors = (mx.abs(wide(y)) - size) / (mx.maximum(size, least) * ROUNDING[dtype])
    mean = (mx.where(normal, mx.clip(errors, -2, 2), 0).sum() / count).item()
    if abs(mean) <= MOST_BIAS:
        return None
    return f"results are {mean:+.2f} of a rounding error off on average, as if cut off"


def sums(
    problem: Problem, rows: mx.array, weight: Operands
) -> tuple[mx.array, mx.array]:
    """Returns the products [..., m, n] of rows with a weight, and their error bounds.

    The rows [..., m, k] in float64 are of `operands.activations`: most are multiples of
    the first ones.
    """
    first, factor = rows[..., :DISTINCT_ROWS, :], factors(rows.shape[-2])[:, None]
    nth = mx.arange(rows.shape[-2]) % DISTINCT_ROWS
    total = first @ weight.exact.swapaxes(-1, -2)
    off = _norm_products(first, weight.magnitude) * OF_SUM[problem.dtype]
    return total[..., nth, :] * factor, off[..., nth, :] * mx.abs(factor)


def _norm_products(rows: mx.array, weights: mx.array) -> mx.array:
    """Returns a bound of the sum of magnitudes of each result (Cauchy-Schwarz).

    That is cheaper than another product, and for these operands less than twice as
    large. Times `OF_SUM` it is the error bound of the float32 sum.
    """
    of_rows, of_weights = (
        mx.sqrt(mx.square(array).sum(-1)) for array in (rows, weights)
    )
    return of_rows[..., :, None] * of_weights[..., None, :]


def activated(name: str, y: mx.array) -> mx.array:
    """Returns the activation of `mlx.nn` with this name, in float64."""
    if name == "silu":
        return y * mx.sigmoid(y)
    if name == "gelu":
        return y * (1 + mx.erf(y / math.sqrt(2))) / 2
    if name == "gelu_approx":
        inner = math.sqrt(2 / math.pi) * (y + 0.044715 * y * y * y)
        return 0.5 * y * (1 + mx.tanh(inner))
    return y


def _with_epilogue(sums: Answer, epilogue: Epilogue, arrays: EpilogueArrays) -> Answer:
    total, off = sums.values, sums.bound
    total = total if arrays.bias is None else total + wide(arrays.bias)
    if epilogue.activation != "none":
        total, off = activated(epilogue.activation, total), off * STEEPEST
    if arrays.multiply is not None:
        factor = wide(arrays.multiply)
        total, off = total * factor, off * mx.abs(factor)
    off = off + mx.abs(total) * OF_FUNCTIONS
    if arrays.residual is not None:
        total = total + wide(arrays.residual)
    return Answer(total, off)


def _product(
    problem: Problem, rows: mx.array, weight: Operands, arrays: EpilogueArrays
) -> tuple[mx.array, mx.array]:
    """Returns the products of rows, normalized or not, and their error bounds."""
    if problem.norm is None:
        return sums(problem, rows, weight)
    assert arrays.norm is not None
    rows = rows * norm_factor(rows, problem.norm) * wide(arrays.norm)
    total = rows @ weight.exact.swapaxes(-1, -2)
    off = _norm_products(rows, weight.magnitude) * OF_SUM[problem.dtype]
    roundings = ROUNDING[problem.dtype] * OF_NORMED_ROWS / math.sqrt(problem.k)
    return total, off + _norm_products(rows, weight.exact) * roundings


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
