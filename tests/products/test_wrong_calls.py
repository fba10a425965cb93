"""A wrong call raises what MLX raises, also where MLX crashes or reads past an end."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin.weights.packed_weight import PackedWeight
from support.arguments import (
    BIASES,
    FP4,
    FP4_SCALES,
    PACKED,
    SCALES,
    K,
    N,
    W,
    X,
    activations,
)

WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "mode": ((X, W, SCALES, BIASES), {"mode": "foo"}),
    "group size that does not fit": ((X, W, SCALES, BIASES), {"group_size": 32}),
    "group size of no format": ((X, W, SCALES, BIASES), {"group_size": 16}),
    "negative group size": ((X, W, SCALES, BIASES), {"group_size": -64}),
    "group size 0": ((X, W, SCALES, BIASES), {"group_size": 0}),
    "bits that do not fit": ((X, W, SCALES, BIASES), {"bits": 8}),
    "negative bits": ((X, W, SCALES, BIASES), {"bits": -4}),
    "no biases": ((X, W, SCALES), {}),
    "biases of a float mode": ((X, FP4, FP4_SCALES, BIASES), {"mode": "mxfp4"}),
    "float scales of a float mode": ((X, W, SCALES), {"mode": "mxfp4"}),
    "float w": ((X, activations(N, K), SCALES, BIASES), {}),
    "signed w": ((X, W.astype(mx.int32), SCALES, BIASES), {}),
    "scales and biases that differ": ((X, W, SCALES, BIASES[:10]), {}),
    "scales with too few groups": ((X, W, SCALES[:, :1], BIASES[:, :1]), {}),
    "whole scales": ((X, W, SCALES.astype(mx.uint8), BIASES.astype(mx.uint8)), {}),
    "k": ((X[:, :64], W, SCALES, BIASES), {}),
    "k, no rows": ((X[:0, :64], W, SCALES, BIASES), {}),
    "k, transpose=False": ((X, W, SCALES, BIASES), {"transpose": False}),
    "complex x": ((X.astype(mx.complex64), W, SCALES, BIASES), {}),
    "vector w": ((X, W[0], SCALES[0], BIASES[0]), {}),
    "scalar w": ((X, W[0, 0], SCALES[0, 0], BIASES[0, 0]), {}),
    "batch of w alone": ((X, W[None], SCALES, BIASES), {}),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.usefixtures("served_by")
def test_a_wrong_call_raises_mlxs_own_error(kind: str) -> None:
    arguments, options = WRONG[kind]
    with pytest.raises(ValueError) as stock:  # noqa: PT011
        mx.quantized_matmul(*arguments, **options)

    for ask in (mlx_marlin.quantized_matmul, mlx_marlin.why_not):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            ask(*arguments, **options)
        assert str(error.value) == str(stock.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ([[[1.0] * K]], W, SCALES, BIASES),
        (np.ones((1, 1, K), np.float32), W, SCALES, BIASES),
        (1.0, W, SCALES, BIASES),
        (None, W, SCALES, BIASES),
        (X, np.zeros((N, K // 8), np.uint32), SCALES, BIASES),
        (X, W, [1.0], BIASES),
        (X, W, None, None),
        (X, W),
        (X, W, SCALES, "biases"),
        (None, PACKED),
    ],
)
@pytest.mark.usefixtures("served_by")
def test_what_is_not_an_array_is_a_type_error(arguments: tuple[Any, ...]) -> None:
    if not isinstance(arguments[1], PackedWeight):
        with pytest.raises(TypeError):
            mx.quantized_matmul(*arguments)

    for ask in (mlx_marlin.quantized_matmul, mlx_marlin.why_not):
        with pytest.raises(TypeError, match=r"must be mx\.array.*got"):
            ask(*arguments)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        # MLX reads past the end of the scales here.
        (
            (X, W, SCALES[:10], BIASES[:10]),
            {},
            r"scales has shape \(10, 2\).*\(40, 16\)",
        ),
        ((X, W, SCALES[:0], BIASES[:0]), {}, r"scales has shape \(0, 2\).*\(40, 16\)"),
        ((X, FP4, FP4_SCALES[1:]), {"mode": "mxfp4"}, r"scales has shape \(39, 4\)"),
        # MLX divides by zero here, and says "SmallVector out of range" there.
        ((X, W, SCALES, BIASES), {"bits": 0}, "bits=0"),
        (
            (X[0, 0], W, SCALES, BIASES),
            {},
            r"x has no dimensions, expected \[\.\.\., k\]",
        ),
    ],
)
@pytest.mark.usefixtures("served_by")
def test_where_mlx_crashes_or_reads_elsewhere_ours_raises(
    arguments: tuple[mx.array, ...], options: dict[str, Any], message: str
) -> None:
    for ask in (mlx_marlin.quantized_matmul, mlx_marlin.why_not):
        with pytest.raises(ValueError, match=message):
            ask(*arguments, **options)


@pytest.mark.parametrize("options", [{"mode": None}, {"bits": 2.5}, {"transpose": 3}])
@pytest.mark.usefixtures("served_by")
def test_an_option_of_the_wrong_type_is_a_type_error(options: dict[str, Any]) -> None:
    for ask in (mx.quantized_matmul, mlx_marlin.quantized_matmul, mlx_marlin.why_not):
        with pytest.raises(TypeError):
            ask(X, W, SCALES, BIASES, **options)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (X, {"group_size": 32}, r"\(32, 4, 'affine'\).*\(64, 4, 'affine'\)"),
        (X, {"group_size": 0}, r"\(0, 4, 'affine'\)"),
        (X, {"bits": 8}, r"\(64, 8, 'affine'\)"),
        (X, {"bits": 0}, r"\(64, 0, 'affine'\)"),
        (X, {"mode": "mxfp4"}, r"\(64, 4, 'mxfp4'\)"),
        (X, {"scales": SCALES}, "carries its scales and biases"),
        (X, {"biases": BIASES}, "carries its scales and biases"),
        (X[:, :64], {}, r"x has shape \(3, 64\), expected \[\.\.\., 128\]"),
        (X[:0, :64], {}, r"x has shape \(0, 64\), expected \[\.\.\., 128\]"),
        (X, {"transpose": False}, r"x has shape \(3, 128\), expected \[\.\.\., 40\]"),
        (X[0, 0], {}, r"x has shape \(\), expected \[\.\.\., 128\]"),
        (X.astype(mx.complex64), {}, "complex64"),
    ],
)
@pytest.mark.usefixtures("served_by")
def test_a_packed_weight_refuses_what_does_not_fit_it(
    x: mx.array, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mlx_marlin.quantized_matmul(x, PACKED, **options)
