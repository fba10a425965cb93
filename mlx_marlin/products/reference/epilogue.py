"""Epilogues and norms in the operations of stock MLX, and checks of their arrays."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import cast

import mlx.core as mx

from mlx_marlin.argument_types import check_arrays
from mlx_marlin.backends.graph import Product
from mlx_marlin.planning.epilogue import Epilogue, Rotation


def activation(name: str) -> Callable[[mx.array], mx.array]:
    """Returns the function of `mlx.nn` for an activation."""
    from mlx import nn

    if name == "none":
        return lambda y: y
    found: Callable[[mx.array], mx.array] = getattr(nn, name)
    return found


def with_epilogue(product: Product, epilogue: Epilogue) -> Product:
    """Returns a product followed by an epilogue in MLX's operations."""
    activate = activation(epilogue.activation)

    def run(
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

    return run


def rotated(
    y: mx.array,
    rotation: Rotation,
    parts: tuple[int, ...],
    positions: mx.array,
    freqs: mx.array,
    *norms: mx.array,
) -> mx.array:
    """Returns the heads [m, heads, 1, features] of a product [..., n], rotated.

    `positions`: position of each row, int32 [m]; or int32 of any length, whose first
    element is the position of all rows.
    `freqs`: of a head's pairs, float32 [features / 2].
    `norms`: weights [features] of the RMSNorms of q and k, if the rotation has them.
    """
    features = rotation.features
    heads = y.reshape(math.prod(y.shape[:-1]), y.shape[-1] // features, 1, features)
    points, others = mx.split(heads, [rotation.columns // features], axis=1)
    if rotation.norm is not None:
        points = _normalized(points, rotation, norms)
    points = points.astype(mx.float32) * rotation.factor
    first, second = mx.split(points, 2, axis=-1)
    # Not MLX's rope: on a GPU it raises, because it has no derivative for freqs.
    own = (positions if rotation.per_row else positions[:1]).astype(mx.float32)
    angles = own[:, None, None, None] * (1 / freqs)
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
    """Returns heads [m, heads, 1, features] after the RMSNorms of q and k."""
    assert rotation.norm is not None
    both = mx.split(heads, [rotation.queries // rotation.features], axis=1)
    normalized = (
        mx.fast.rms_norm(group, weight.astype(group.dtype), rotation.norm)
        for group, weight in zip(both, norms, strict=True)
    )
    return mx.concatenate([*normalized], axis=1)


def with_norm(product: Product, epsilon: float) -> Product:
    """Returns a product of rows that an RMSNorm normalizes first."""

    def normalized(x: mx.array, *given: mx.array) -> mx.array:
        *others, weight = given
        return product(mx.fast.rms_norm(x, weight, epsilon), *others)

    return normalized


def split_apart(y: mx.array, parts: tuple[int, ...]) -> tuple[mx.array, ...]:
    """Returns the columns of each part of a product [..., n]."""
    return tuple(mx.split(y, [*accumulate(parts)][:-1], axis=-1))


def check_rotation(
    rows: int,
    rotation: Rotation,
    positions: mx.array,
    freqs: mx.array,
    norms: Sequence[mx.array],
) -> None:
    """Checks the arrays of a rotation."""
    fits = positions.shape == (rows,) if rotation.per_row else positions.ndim == 1
    if positions.dtype != mx.int32 or not positions.size or not fits:
        expected = f"[{rows}]" if rotation.per_row else "[1 or more]"
        raise ValueError(
            f"positions are {positions.dtype} {positions.shape}, expected int32 "
            f"{expected}"
        )
    check_frequencies(rotation, freqs, norms)


def check_frequencies(
    rotation: Rotation, freqs: mx.array, norms: Sequence[mx.array]
) -> None:
    """Checks the arrays of a rotation that do not depend on rows."""
    if freqs.dtype != mx.float32 or freqs.shape != (rotation.features // 2,):
        raise ValueError(
            f"freqs are {freqs.dtype} {freqs.shape}, expected float32 "
            f"[{rotation.features // 2}]"
        )
    expected_norms = [(rotation.features,)] * (0 if rotation.norm is None else 2)
    shapes = [norm.shape for norm in norms]
    if shapes != expected_norms:
        raise ValueError(
            f"norms have shapes {shapes}, expected {expected_norms} with "
            f"norm={rotation.norm}"
        )


def with_placeholders(product: Product, epilogue: Epilogue) -> Product:
    """Returns a launched product that takes only the arrays that the epilogue has.

    A kernel takes bias, multiplier and residual; x stands in for an absent one, which
    the kernel does not read. The arrays of a rotation and a norm's weight follow.
    """
    present = (epilogue.bias, epilogue.multiply, epilogue.residual)

    def run(
        x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *given: mx.array
    ) -> mx.array:
        arrays = iter(given)
        operands = [next(arrays) if has else x for has in present]
        return product(x, w, scales, biases, *operands, *arrays)

    return run


def check_operands(
    shape: Sequence[int],
    bias: mx.array | None,
    multiply: mx.array | None,
    residual: mx.array | None,
) -> None:
    """Checks an epilogue's arrays against the result's shape."""
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
