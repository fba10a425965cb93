"""The arrays of an epilogue and of a norm before: the same in MLX's own words."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import cast

import mlx.core as mx

from mlx_marlin.argument_types import check_arrays
from mlx_marlin.backends.launch import Product
from mlx_marlin.planning.epilogue import Epilogue, Rotation


def activation(name: str) -> Callable[[mx.array], mx.array]:
    """Returns what `mlx.nn` calls an activation of ours."""
    from mlx import nn

    if name == "none":
        return lambda y: y
    found: Callable[[mx.array], mx.array] = getattr(nn, name)
    return found


def then_finished(product: Product, epilogue: Epilogue) -> Product:
    """Returns a product of MLX's with the epilogue after it, operation by operation.

    Args:
        product: From x, codes, scales and biases to y.
        epilogue: What follows.

    Returns:
        A function that takes the epilogue's arrays too, only those that it has. Where
        there are parts, it returns a tuple of them.
    """
    activate = activation(epilogue.activation)

    def finished(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *given: mx.array
    ) -> mx.array:
        y = product(x, w, scales, biases)
        if epilogue.gated:
            gate, up = mx.split(y, 2, axis=-1)
            return activate(gate) * up
        own = epilogue.bias + epilogue.operands
        arrays = iter(array.astype(y.dtype) for array in given[:own])
        y = activate(y + next(arrays) if epilogue.bias else y)
        y = y * next(arrays) if epilogue.multiply else y
        y = y + next(arrays) if epilogue.residual else y
        if epilogue.rotation is not None:
            return rotated(y, epilogue.rotation, epilogue.parts, *given[own:])
        if not epilogue.parts:
            return y
        return cast(mx.array, split_apart(y, epilogue.parts))

    return finished


def rotated(
    y: mx.array,
    rotation: Rotation,
    parts: tuple[int, ...],
    places: mx.array,
    periods: mx.array,
    *norms: mx.array,
) -> mx.array:
    """Returns the heads [m, heads, 1, features] of a product [..., n] of MLX's.

    Args:
        y: The product.
        rotation: Which of them are rotated.
        parts: Columns of several results.
        places: Of each row, int32 [m]; or any, of which the first is all rows'.
        periods: Of a head's pairs, float32 [features / 2].
        norms: Weights [features] of the norms of q and k, if the rotation has them.
    """
    features, each = rotation.features, rotation.each
    heads = y.reshape(math.prod(y.shape[:-1]), y.shape[-1] // features, 1, features)
    points, others = mx.split(heads, [rotation.columns // features], axis=1)
    if rotation.norm is not None:
        points = _normalized(points, rotation, norms)
    points = points.astype(mx.float32) * rotation.factor
    first, second = mx.split(points, 2, axis=-1)
    # Not MLX's rope: on a GPU it has no derivative for periods, and raises.
    of_rows = (places if each else places[:1]).astype(mx.float32)
    angles = of_rows[:, None, None, None] * (1 / periods)
    sine, cosine = mx.sin(angles), mx.cos(angles)
    turned = mx.concatenate(
        [first * cosine - second * sine, first * sine + second * cosine], axis=-1
    )
    heads = mx.concatenate([turned.astype(heads.dtype), others], axis=1)
    if not parts:
        return heads
    ends = [end // features for end in accumulate(parts)]
    return cast(mx.array, tuple(mx.split(heads, ends[:-1], axis=1)))


def _normalized(
    heads: mx.array, rotation: Rotation, norms: Sequence[mx.array]
) -> mx.array:
    """Returns heads [m, heads, 1, features] through the norms of q and k."""
    assert rotation.norm is not None
    both = mx.split(heads, [rotation.queries // rotation.features], axis=1)
    normalized = (
        mx.fast.rms_norm(each, weight.astype(each.dtype), rotation.norm)
        for each, weight in zip(both, norms, strict=True)
    )
    return mx.concatenate([*normalized], axis=1)


def of_normalized(product: Product, epsilon: float) -> Product:
    """Returns a product of MLX's of rows that it normalizes before.

    Args:
        product: From x, a weight's arrays and an epilogue's to y.
        epsilon: As in `Problem.norm`.

    Returns:
        A function that takes the norm's weight too, at last.
    """

    def normalized(x: mx.array, *given: mx.array) -> mx.array:
        *others, weight = given
        return product(mx.fast.rms_norm(x, weight, epsilon), *others)

    return normalized


def split_apart(y: mx.array, parts: tuple[int, ...]) -> tuple[mx.array, ...]:
    """Returns the columns of each part of a product [..., n] of MLX's."""
    return tuple(mx.split(y, [*accumulate(parts)][:-1], axis=-1))


def check_rotation(
    rows: int,
    rotation: Rotation,
    places: mx.array,
    periods: mx.array,
    norms: Sequence[mx.array],
) -> None:
    """Checks the arrays of a rotation.

    Raises:
        ValueError: If one is not what the rotation of so many rows takes.
    """
    fits = places.shape == (rows,) if rotation.each else places.ndim == 1
    if places.dtype != mx.int32 or not places.size or not fits:
        expected = f"[{rows}]" if rotation.each else "[1 or more]"
        raise ValueError(
            f"places are {places.dtype} {places.shape}, expected int32 {expected}"
        )
    if periods.dtype != mx.float32 or periods.shape != (rotation.features // 2,):
        raise ValueError(
            f"periods are {periods.dtype} {periods.shape}, expected float32 "
            f"[{rotation.features // 2}]"
        )
    expected_norms = [(rotation.features,)] * (0 if rotation.norm is None else 2)
    if [each.shape for each in norms] != expected_norms:
        raise ValueError(
            f"norms have shapes {[each.shape for each in norms]}, expected "
            f"{expected_norms} with norm={rotation.norm}"
        )


def with_all_operands(product: Product, epilogue: Epilogue) -> Product:
    """Lets a launched product take only the arrays that the epilogue has.

    The kernel has a place for each; where it reads none, x stands in. Those of a
    rotation and a norm's weight, where there are any, follow.
    """
    places = (epilogue.bias, epilogue.multiply, epilogue.residual)

    def run(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *given: mx.array
    ) -> mx.array:
        arrays = iter(given)
        operands = [next(arrays) if has else x for has in places]
        return product(x, w, scales, biases, *operands, *arrays)

    return run


def check_operands(
    shape: Sequence[int],
    bias: mx.array | None,
    multiply: mx.array | None,
    residual: mx.array | None,
) -> None:
    """Checks an epilogue's arrays against the result's shape.

    Raises:
        TypeError: If one is not an array.
        ValueError: If one has another shape than it should.
    """
    for name, array, expected in (
        ("bias", bias, tuple(shape[-1:])),
        ("multiply", multiply, tuple(shape)),
        ("residual", residual, tuple(shape)),
    ):
        if array is None:
            continue
        if not isinstance(array, mx.array):
            check_arrays(**{name: array})
        if array.shape != expected:
            raise ValueError(
                f"{name} has shape {array.shape}, expected {expected} for a result of "
                f"shape {tuple(shape)}"
            )
