"""Known answers of the guard and their error bounds, by formulas in NumPy."""

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_marlin.guard import operands
from mlx_marlin.guard.reference import Answer, EpilogueArrays
from mlx_marlin.planning.epilogue import Rotation
from mlx_marlin.planning.problem import Problem

Reals = NDArray[np.float64]
Pair = tuple[Reals, Reals]

UNIT = {"float16": 1 / 2048, "bfloat16": 1 / 256, "float32": 2**-24}
"""Half a unit in the last place: 11, 8 and 24 bits of significand."""
TINY = {"float16": 2**-24, "bfloat16": 2**-126, "float32": 2**-126}
OF_SUM = {"float16": 2**-15, "bfloat16": 2**-12, "float32": 2**-19}
OF_FUNCTION = 2**-18
SLOPE = 1.2


def exact(array: mx.array | None) -> Reals:
    """Returns an array in float64, without a way through float32."""
    assert array is not None
    with mx.stream(mx.cpu):
        return np.array(array.astype(mx.float64))


erf = np.vectorize(math.erf, otypes=[float])


def gelu_approx(y: Reals) -> Reals:
    inner = np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)
    return 0.5 * y * (1 + np.tanh(inner))


ACTIVATIONS: dict[str, Callable[[Reals], Reals]] = {
    "none": lambda y: y,
    "silu": lambda y: y / (1 + np.exp(-y)),
    "gelu": lambda y: y * (1 + erf(y / math.sqrt(2))) / 2,
    "gelu_approx": gelu_approx,
}


def rounded(values: Reals, bound: Reals, dtype: str) -> Pair:
    return values, bound + np.abs(values) * UNIT[dtype] + TINY[dtype]


def norms(rows: Reals) -> Reals:
    return np.sqrt((rows**2).sum(-1))


def summed(x: Reals, weight: operands.Operands, problem: Problem) -> Pair:
    w, magnitude = exact(weight.exact), exact(weight.magnitude)
    of_terms = norms(x)[..., :, None] * norms(magnitude)[..., None, :]
    return x @ w.swapaxes(-1, -2), of_terms * OF_SUM[problem.dtype]


def gate_and_up(activation: str, gate: Pair, up: Pair) -> Pair:
    a, factor = gate[0], up[0]
    if activation == "swiglu_oai":
        a = np.minimum(a, 7)
        y, factor = a / (1 + np.exp(-1.702 * a)), np.clip(factor, -7, 7) + 1
    else:
        y = ACTIVATIONS[activation](a)
    off_y = 2 * SLOPE * gate[1] + np.abs(y) * OF_FUNCTION
    off_up = 2 * up[1]
    return y * factor, off_y * np.abs(factor) + np.abs(y) * off_up + off_y * off_up


def with_heads(total: Pair, rotation: Rotation, arrays: EpilogueArrays) -> Pair:
    """Returns heads [rows, heads, 1, features], head by head."""
    size, half = rotation.features, rotation.features // 2
    assert arrays.positions is not None
    assert arrays.freqs is not None
    positions = np.broadcast_to(exact(arrays.positions), len(total[0]))
    angle = positions[:, None] / exact(arrays.freqs)
    cosine, sine = np.cos(angle), np.sin(angle)
    found: list[Pair] = []
    for column in range(0, total[0].shape[1], size):
        values, off = (each[:, column : column + size] for each in total)
        if column < rotation.columns:
            if rotation.norm is not None:
                weight = exact(arrays.head_norms[column >= rotation.queries])
                mean = (values**2).mean(-1, keepdims=True)
                factor = 1 / np.sqrt(mean + rotation.norm)
                of_factor = np.sqrt((off**2).mean(-1, keepdims=True)) * factor
                off = off + np.abs(values) * (of_factor + OF_FUNCTION)
                values = values * factor * weight
                off = off * factor * np.abs(weight)
            a, b = values[:, :half], values[:, half:]
            off_a, off_b = off[:, :half], off[:, half:]
            of_angle = (np.abs(a) + np.abs(b)) * (1 + np.abs(angle)) * 2**-20
            c, s = np.abs(cosine), np.abs(sine)
            turned = a * cosine - b * sine, a * sine + b * cosine
            offs = off_a * c + off_b * s + of_angle, off_a * s + off_b * c + of_angle
            values = np.concatenate(turned, -1) * rotation.factor
            off = np.concatenate(offs, -1) * rotation.factor
        found.append((values, off))
    values, off = (np.stack(each, 1)[:, :, None] for each in zip(*found, strict=True))
    return values, off


def expected(
    problem: Problem, x: Reals, weight: operands.Operands, arrays: EpilogueArrays
) -> Pair:
    epilogue = problem.epilogue
    if problem.norm is not None:
        factor = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + problem.norm)
        x = x * factor * exact(arrays.norm)
    y, off = summed(x, weight, problem)
    if problem.norm is not None:
        of_rows = norms(x)[:, None] * norms(exact(weight.exact))
        off = off + of_rows * UNIT[problem.dtype] * 3 / np.sqrt(problem.k)
    if epilogue.gated:
        half = problem.n // 2
        gate, up = (y[:, :half], off[:, :half]), (y[:, half:], off[:, half:])
        return rounded(*gate_and_up(epilogue.activation, gate, up), problem.dtype)
    if arrays.bias is not None:
        y = y + exact(arrays.bias)
    if epilogue.rotation is not None:
        heads = with_heads((y, 2 * off), epilogue.rotation, arrays)
        return rounded(*heads, problem.dtype)
    if epilogue.activation != "none":
        y, off = ACTIVATIONS[epilogue.activation](y), off * SLOPE
    if arrays.multiply is not None:
        y, off = y * exact(arrays.multiply), off * np.abs(exact(arrays.multiply))
    off = off + np.abs(y) * OF_FUNCTION
    if arrays.residual is not None:
        y = y + exact(arrays.residual)
    return rounded(y, off, problem.dtype)


def assert_close(found: Answer, known: Pair) -> None:
    values, bound = known
    assert (found.values.shape, found.bound.shape) == (values.shape, bound.shape)
    # MLX computes exponential functions, sines and cosines of float64 as of float32.
    np.testing.assert_allclose(exact(found.values), values, rtol=1e-5, atol=3e-6)
    np.testing.assert_allclose(exact(found.bound), bound, rtol=1e-4)
