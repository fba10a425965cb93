"""The public calls and layers answer as MLX's own for every scheme and width."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin.backends import planner
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.products.packing import quantize
from mlx_marlin.weights.dtypes import dtype_name
from support import format_cases, oracles
from support.choose import Choose
from support.format_calls import (
    FEW,
    FLOATING,
    NOT_IN_MLX,
    ONE_EACH,
    K,
    N,
    W,
    X,
    assert_close,
    few,
    layouts,
    native,
    options_of,
    quantized_as,
)
from support.format_cases import OF_MLX, Weight
from support.gather_calls import LIMITS, STOCK_AFFINE
from support.packed_codes import packed_weights
from support.profiles import sampled
from support.strategies import Grouped

OURS = ("affine", "symmetric", "zero_point")
"""Modes whose scales are floats, which have gradients."""
pytestmark = pytest.mark.usefixtures("kernels", "_the_same_numbers")


@pytest.fixture
def _the_same_numbers() -> None:
    mx.random.seed(0)  # layers draw their weights


@sampled(6)
@pytest.mark.parametrize("grouped", dict.fromkeys([*ONE_EACH, *NOT_IN_MLX]), ids=str)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_a_product_of_any_format_has_mlxs_dtype(
    grouped: Grouped, dtype: mx.Dtype
) -> None:
    mode, bits, group_size = grouped
    k = 2 * format_cases.step_of(mode, bits, group_size)
    weight = format_cases.any_weight(
        mode, bits, group_size, N, k, dtype="float16", seed=4
    )
    packed = mlx_marlin.pack(*weight.native, **weight.options)
    x = mx.random.normal((2, 3, k), key=mx.random.key(1)).astype(dtype)
    calls: list[tuple[Any, ...]] = [(packed,)]
    has_floats = weight.native[1].dtype == mx.float16
    expected_dtype = mx.float32 if has_floats and dtype == mx.bfloat16 else dtype
    if (mode, bits, group_size) in OF_MLX:
        calls.append(weight.native)
        stock = mx.quantized_matmul(x, *weight.native, **weight.options)
        assert stock.dtype == expected_dtype

    for stored in calls:
        options = {} if stored[0] is packed else weight.options
        assert mlx_marlin.why_not(x, *stored, **options) is None
        y = mlx_marlin.quantized_matmul(x, *stored, **options)
        assert y.dtype == expected_dtype
        limit = LIMITS[dtype_name(y.dtype)]
        assert oracles.error(y, oracles.exact(x) @ weight.decoded.T) < limit
    wrong = "mxfp4" if mode != "mxfp4" else "nvfp4"
    for option in ({"mode": wrong}, {"bits": 7}):
        with pytest.raises(ValueError, match=f"do not fit the packed weight.*{mode}"):
            mlx_marlin.quantized_matmul(x, packed, **option)


@pytest.mark.parametrize(("mode", "bits", "group_size"), [("affine", 4, 64), *FLOATING])
def test_defaults_of_a_mode_are_mlxs(mode: str, bits: int, group_size: int) -> None:
    arrays = mx.quantize(W, mode=mode)

    y = mlx_marlin.quantized_matmul(X, *arrays, mode=mode)

    assert_close(y, mx.quantized_matmul(X, *arrays, mode=mode))
    ours = quantize(W, mode=mode)
    assert (ours.group_size, ours.bits) == (group_size, bits)
    assert mx.array_equal(mlx_marlin.unpack(ours)[0], arrays[0])


@sampled(3)
@few
@layouts
def test_an_epilogue_follows_any_format(
    mode: str, bits: int, group_size: int, layout: str
) -> None:
    options = options_of(mode, bits, group_size)
    arrays = native(options)
    weight = arrays if layout == "mlx" else [mlx_marlin.pack(*arrays, **options)]
    given = options if layout == "mlx" else {}
    keys = mx.random.split(mx.random.key(5), 3)
    shapes = ((N,), (2, 3, N), (2, 3, N))
    bias, multiply, residual = (
        mx.random.normal(shape, key=key).astype(mx.float16)
        for shape, key in zip(shapes, keys, strict=True)
    )

    y = mlx_marlin.linear(
        X,
        *weight,
        bias=bias,
        activation="silu",
        multiply=multiply,
        residual=residual,
        **given,
    )

    product = mx.quantized_matmul(X, *arrays, **options)
    assert_close(y, nn.silu(product + bias) * multiply + residual)


@sampled(3, 7)
@pytest.mark.parametrize(
    ("mode", "bits", "group_size", "layout"),
    [(*each, "mlx") for each in FEW] + [(*each, "marlin") for each in FEW + NOT_IN_MLX],
)
def test_an_invariant_row_is_what_it_is_alone(
    mode: str, bits: int, group_size: int, layout: str
) -> None:
    k = 4 * format_cases.step_of(mode, bits, group_size)
    weight = format_cases.any_weight(
        mode, bits, group_size, N, k, dtype="float16", seed=4
    )
    native, options = weight.native, weight.options
    stored = native if layout == "mlx" else (mlx_marlin.pack(*native, **options),)
    given = {"invariant": True} | (options if layout == "mlx" else {})
    rows = mx.random.normal((9, k), key=mx.random.key(1)).astype(mx.float16)

    together = mlx_marlin.linear(rows, *stored, **given)

    for i in range(len(rows)):
        alone = mlx_marlin.linear(rows[i : i + 1], *stored, **given)
        assert mx.array_equal(alone[0], together[i])


@sampled(2)
@few
def test_the_weight_as_it_is_is_stocks_unless_it_is_packed(
    mode: str, bits: int, group_size: int
) -> None:
    options = options_of(mode, bits, group_size)
    arrays = native(options)
    x = X[..., :N]  # a multiple of no step
    expected = mx.quantized_matmul(x, *arrays, transpose=False, **options)

    reason = mlx_marlin.why_not(x, *arrays, transpose=False, **options)
    y = mlx_marlin.quantized_matmul(x, *arrays, transpose=False, **options)
    packed = mlx_marlin.pack(*arrays, **options)
    of_packed = mlx_marlin.quantized_matmul(x, packed, transpose=False)

    assert "transposed weight only" in reason
    assert mx.array_equal(y, expected)
    assert_close(of_packed, expected)


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [
        ("affine", 0, 64),
        ("affine", 4, 0),
        ("mxfp4", 8, 32),
        ("mxfp4", 4, 64),
        ("mxfp4", 4, 0),
        ("nvfp4", 4, 32),
        ("mxfp8", 4, 32),
        ("nf4", 4, 64),
    ],
)
def test_formats_that_there_are_not_are_refused(
    mode: str, bits: int, group_size: int
) -> None:
    # Else arrays that fit: MLX itself takes the small floats' as they should have been.
    dtype = mx.float16 if mode == "affine" else mx.uint8
    scales = mx.zeros((N, K // (group_size or 64)), dtype)
    arrays = mx.zeros((N, K * (bits or 4) // 32), mx.uint32), scales
    biases = scales if mode == "affine" else None

    for call in (mlx_marlin.quantized_matmul, mlx_marlin.why_not):
        with pytest.raises((ValueError, RuntimeError)):
            call(X, *arrays, biases, True, group_size, bits, mode)
    with pytest.raises(ValueError, match=r"bits=|group_size=|mode="):
        mlx_marlin.pack(*arrays, biases, **options_of(mode, bits, group_size))


@sampled(12)
@pytest.mark.parametrize(("mode", "bits", "group_size"), NOT_IN_MLX)
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("dtype", LIMITS)
def test_without_kernels_stock_serves_a_format_of_ours(
    backend: Choose, mode: str, bits: int, group_size: int, dtype: str, transpose: bool
) -> None:
    k = 2 * format_cases.step_of(mode, bits, group_size)
    packed, decoded = packed_weights((mode, bits, group_size), n=N, k=k, dtype=dtype)
    x = mx.random.normal((3, k if transpose else N), key=mx.random.key(1))
    x = x.astype(getattr(mx, dtype))
    backend("stock")

    y = mlx_marlin.quantized_matmul(x, packed, transpose=transpose)

    assert mlx_marlin.why_not(x, packed, transpose=transpose) is not None
    expected = oracles.exact(x) @ (decoded.T if transpose else decoded)
    assert y.dtype == x.dtype
    limit = LIMITS[dtype] * (STOCK_AFFINE if mode == "affine" else 1)
    if dtype == "float32" and mode not in OURS:
        limit = 1e-6
    assert oracles.error(y, expected) < limit


@sampled(3)
@pytest.mark.parametrize(("mode", "bits", "group_size"), NOT_IN_MLX)
def test_a_format_of_ours_is_finished_and_has_gradients(
    mode: str, bits: int, group_size: int
) -> None:
    k = 2 * format_cases.step_of(mode, bits, group_size)
    packed, decoded = packed_weights((mode, bits, group_size), n=N, k=k)
    x = mx.random.normal((3, k), key=mx.random.key(1))
    bias = mx.random.normal((N,), key=mx.random.key(2))
    exact = oracles.exact(x)

    def of(x: mx.array, scales: mx.array) -> mx.array:
        again = replace(packed, scales=scales)
        return mlx_marlin.quantized_matmul(x, again).square().sum()

    y = mlx_marlin.linear(x, packed, bias=bias, activation="silu")
    back = mlx_marlin.quantized_matmul(x[:, :N], packed, transpose=False)
    dx = mx.grad(of)(x, packed.scales)

    total = exact @ decoded.T + oracles.exact(bias)
    finished = oracles.exact(nn.silu(mx.array(total.astype(np.float32))))
    assert oracles.error(y, finished) < 1e-5
    assert oracles.error(back, exact[:, :N] @ decoded) < 1e-5
    assert oracles.error(dx, 2 * exact @ decoded.T @ decoded) < 1e-5
    if mode not in OURS:
        return
    # The loss is quadratic in what a group stores, or in all but the zero points.
    slope = oracles.exact(mx.grad(of, 1)(x, packed.scales) * packed.scales)
    slope = slope if mode != "zero_point" else slope[..., ::2]
    np.testing.assert_allclose(
        slope.sum(), 2 * ((exact @ decoded.T) ** 2).sum(), rtol=1e-4
    )


def test_modes_that_only_packed_weights_have_are_not_mlxs() -> None:
    weight = Weight("symmetric", 4, 64, quantized_as("symmetric"))

    with pytest.raises(ValueError, match="mode"):
        mlx_marlin.quantized_matmul(X, *weight.native, mode="symmetric")
    with pytest.raises(ValueError, match="mode"):
        MarlinLinear(K, N, mode="symmetric")


@pytest.mark.parametrize(
    "grouped", [each for each in NOT_IN_MLX if each[0] not in OURS]
)
def test_other_gpus_say_that_they_have_no_kernel(grouped: Grouped) -> None:
    mode, bits, group_size = grouped
    form = {"mode": mode, "bits": bits, "group_size": group_size, "layout": "marlin"}
    with pytest.raises(ValueError, match=r"K-quants|codebooks"):
        planner.plan(4, 64, 256, **form, chip="NVIDIA H200")
