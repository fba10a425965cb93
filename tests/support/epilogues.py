"""What an epilogue makes of a product, in float64, and how far float32 may be off."""

import math

import mlx.core as mx
import numpy as np

from mlx_marlin.planning.epilogue import Epilogue, Rotation
from mlx_marlin.planning.plan import Plan
from support import drawn_arrays, format_cases, oracles
from support.oracles import Floats, exact

ERROR_FUNCTION = np.vectorize(math.erf, otypes=[float])
STEEPEST = 1.13
"""No activation is steeper anywhere."""
OF_ACTIVATION = {
    "none": 0.0,
    "silu": 2.0**-21,
    # Half the error of the error function, and the rounding of 1 + it.
    "gelu": 1.5e-7 / 2 + 2.0**-23,
    # Ten times the slope's rounding: the exponential multiplies it by the slope.
    "gelu_approx": 2.0**-20,
}
"""Error of an activation in float32, as a share of its argument."""
LARGEST = {"float16": 65504.0}
"""The largest number of a dtype that a product may exceed."""


def activated(x: Floats, activation: str) -> Floats:
    """Returns what `mlx.nn` calls by this name, in float64."""
    y = x
    with np.errstate(over="ignore"):
        if activation == "silu":
            y = x / (1 + np.exp(-x))
        if activation == "gelu":
            y = x * (1 + ERROR_FUNCTION(x / math.sqrt(2))) / 2
        if activation == "gelu_approx":
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
            y = 0.5 * x * (1 + np.tanh(inner))
    return y


def finished(total: Floats, finish: drawn_arrays.Native, epilogue: Epilogue) -> Floats:
    """Returns what bias, multiplier and residual, or a gate, make of a product."""
    if epilogue.gated:
        gate, up = np.split(total, 2, axis=-1)
        gated: Floats = activated(gate, epilogue.activation) * up
        return gated
    bias, multiplier, residual = map(oracles.exact, finish)
    y = activated(total + bias if epilogue.bias else total, epilogue.activation)
    y = y * multiplier if epilogue.multiply else y
    return y + residual if epilogue.residual else y


def rotated(
    total: Floats,
    rotation: Rotation,
    positions: mx.array,
    freqs: mx.array,
    *norms: mx.array,
) -> Floats:
    """Returns heads [m, heads, 1, features] whose halves are turned as numbers.

    Angles are MLX's: products in float32, of a place and the inverse of a period. With
    norms, heads are divided by the root of their mean square and multiplied before.
    """
    heads = total.reshape(len(total), -1, 1, rotation.features)
    if rotation.norm is not None:
        kinds = [rotation.queries, rotation.columns - rotation.queries]
        kinds = [columns // rotation.features for columns in kinds]
        others = np.ones((heads.shape[1] - sum(kinds), rotation.features))
        weights = [
            *(
                np.tile(exact(each), (n, 1))
                for each, n in zip(norms, kinds, strict=True)
            ),
            others,
        ]
        roots = np.sqrt(np.mean(heads**2, axis=-1, keepdims=True) + rotation.norm)
        roots[:, sum(kinds) :] = 1
        heads = heads / roots * np.concatenate(weights)[:, None]
    first, second = np.split(heads, 2, axis=-1)
    frequencies = np.float32(1) / np.array(freqs)
    angles = np.array(positions, np.float32)[:, None] * frequencies
    turns = np.exp(1j * angles.astype(np.float64))
    points = (first + 1j * second) * turns[:, None, None] * rotation.factor
    turned = np.concatenate([points.real, points.imag], axis=-1)
    count = rotation.columns // rotation.features
    return np.concatenate([turned[:, :count], heads[:, count:]], axis=1)


def whole(y: mx.array) -> mx.array:
    """Returns what a product gave, parts side by side."""
    return y if isinstance(y, mx.array) else mx.concatenate([*y], axis=-1)


def allowed(
    plan: Plan, x: mx.array, native: drawn_arrays.Native, finish: drawn_arrays.Native
) -> Floats:
    """Returns how far each element may lie from float64."""
    problem, epilogue = plan.problem, plan.problem.epilogue
    group_size = problem.group_size
    total = oracles.product(x, *native, group_size=group_size)
    offset = format_cases.offset_of(problem.format, plan.operand)
    sums = oracles.allowed(x, *native, group_size=group_size, offset=offset)
    if epilogue.gated:
        off = off_of_gated(total, sums, epilogue.activation)
        result = np.abs(finished(total, finish, epilogue))
        rounding = oracles.ROUNDING[problem.dtype] * result
        return off + rounding + oracles.SMALLEST[problem.dtype]
    bias, multiplier, residual = (np.abs(oracles.exact(each)) for each in finish)
    argument = np.abs(total) + (bias if epilogue.bias else 0)
    factor = multiplier if epilogue.multiply else np.ones_like(total)
    steps = STEEPEST * (sums + 2.0**-24 * argument)
    steps += OF_ACTIVATION[epilogue.activation] * argument
    last = argument * factor + (residual if epilogue.residual else 0)
    expected = finished(total, finish, epilogue)
    rounding = oracles.ROUNDING[problem.dtype] * np.abs(expected)
    sums = steps * factor + 2.0**-23 * last
    return sums + rounding + oracles.SMALLEST[problem.dtype]


def off_of_sums(rows: Floats, weight: Floats) -> Floats:
    """Returns how far rows [m, k] @ weight.T [k, n] in float32 may lie from float64.

    The error of a float32 sum is a share of its addends. Scales times codes, biases and
    the offset of codes are at most 16 times the largest weight of a row.
    """
    off: Floats = 2.0**-18 * np.outer(
        np.abs(rows).sum(axis=-1), np.abs(weight).max(axis=-1)
    )
    return off


def are_within(y: mx.array, expected: Floats, bound: Floats) -> bool:
    """Returns whether each element is within its bound before it was rounded.

    A product of two products may be too large for its dtype.
    """
    dtype = str(y.dtype).removeprefix("mlx.core.")
    largest = LARGEST.get(dtype, np.inf)
    bound = bound + oracles.ROUNDING[dtype] * np.abs(expected) + oracles.SMALLEST[dtype]
    found, expected = (
        np.clip(each, -largest, largest) for each in (exact(y), expected)
    )
    return found.shape == expected.shape and bool(
        np.all(np.abs(found - expected) <= bound)
    )


def off_of_gated(total: Floats, sums: Floats, activation: str) -> Floats:
    """Returns how far a gated product may lie from float64 before it is rounded."""
    (gate, up), (of_gate, of_up) = (np.split(each, 2, -1) for each in (total, sums))
    factor = np.abs(activated(gate, activation))
    share = OF_ACTIVATION[activation] + 2.0**-22
    off = STEEPEST * of_gate + share * np.abs(gate)
    result: Floats = off * (np.abs(up) + of_up) + factor * of_up
    return result
