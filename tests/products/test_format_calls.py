"""The public calls and layers answer as MLX's own for every scheme and width."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_marlin
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.products.packing import pack as packed_of
from mlx_marlin.products.packing import quantize
from mlx_marlin.products.reference.weight import as_mlx
from mlx_marlin.weights.formats import FORMATS
from support import format_cases, oracles
from support.choose import Choose
from support.format_calls import (
    FLOATING,
    ONE_EACH,
    K,
    N,
    W,
    X,
    assert_close,
    few,
    layouts,
    loss,
    native,
    of_mlx,
    options_of,
    quantized_as,
)
from support.format_cases import MLX_MODES, Weight
from support.profiles import sampled

pytestmark = pytest.mark.usefixtures("kernels", "_the_same_numbers")


@pytest.fixture
def _the_same_numbers() -> None:
    mx.random.seed(0)  # layers draw their weights


@sampled(3)
@of_mlx
def test_a_product_is_mlxs(mode: str, bits: int, group_size: int) -> None:
    options = options_of(mode, bits, group_size)
    arrays = native(options)
    expected = mx.quantized_matmul(X, *arrays, **options)

    for weight in (arrays, [mlx_marlin.pack(*arrays, **options)]):
        given = options if weight is arrays else {}
        assert mlx_marlin.why_not(X, *weight, **given) is None
        assert_close(mlx_marlin.quantized_matmul(X, *weight, **given), expected)


@sampled(4)
@pytest.mark.parametrize(("mode", "bits", "group_size"), ONE_EACH)
def test_a_packed_weight_knows_its_format(
    mode: str, bits: int, group_size: int
) -> None:
    k = max(K, format_cases.step_of(mode, bits, group_size))
    weight = format_cases.any_weight(
        mode, bits, group_size, N, k, dtype="float16", seed=4
    )
    packed = mlx_marlin.pack(*weight.native, **weight.options)
    x = mx.tile(X, (1, 1, k // K))

    y = mlx_marlin.quantized_matmul(x, packed)

    expected = oracles.exact(x) @ weight.decoded.T
    assert oracles.error(y, expected) < oracles.TOLERANCES["float16"]
    wrong = "mxfp4" if mode != "mxfp4" else "nvfp4"
    with pytest.raises(ValueError, match=f"do not fit the packed weight.*{mode}"):
        mlx_marlin.quantized_matmul(x, packed, mode=wrong)
    with pytest.raises(ValueError, match="do not fit the packed weight"):
        mlx_marlin.quantized_matmul(x, packed, bits=7)


@pytest.mark.parametrize(("mode", "bits", "group_size"), [("affine", 4, 64), *FLOATING])
def test_defaults_of_a_mode_are_mlxs(mode: str, bits: int, group_size: int) -> None:
    arrays = mx.quantize(W, mode=mode)

    y = mlx_marlin.quantized_matmul(X, *arrays, mode=mode)

    assert_close(y, mx.quantized_matmul(X, *arrays, mode=mode))
    ours = quantize(W, mode=mode)
    assert (ours.group_size, ours.bits) == (group_size, bits)
    assert mx.array_equal(mlx_marlin.unpack(ours)[0], arrays[0])


@sampled(2, 8)
@few
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_results_have_the_dtype_that_mlx_gives_them(
    mode: str, bits: int, group_size: int, dtype: mx.Dtype
) -> None:
    options = options_of(mode, bits, group_size)
    arrays = native(options)
    x = X.astype(dtype)

    y = mlx_marlin.quantized_matmul(x, *arrays, **options)
    packed = mlx_marlin.quantized_matmul(x, mlx_marlin.pack(*arrays, **options))

    expected = mx.quantized_matmul(x, *arrays, **options)
    assert_close(y, expected, rtol=1e-2)
    assert_close(packed, expected, rtol=1e-2)


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


@few
@layouts
def test_an_invariant_row_is_what_it_is_alone(
    mode: str, bits: int, group_size: int, layout: str
) -> None:
    options = options_of(mode, bits, group_size)
    arrays = native(options)
    weight = arrays if layout == "mlx" else [mlx_marlin.pack(*arrays, **options)]
    given = {"invariant": True} | (options if layout == "mlx" else {})
    rows = X.reshape(-1, K)

    together = mlx_marlin.linear(rows, *weight, **given)

    for i in range(len(rows)):
        alone = mlx_marlin.linear(rows[i : i + 1], *weight, **given)
        assert mx.array_equal(alone[0], together[i])


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


@sampled(2, 6)
@pytest.mark.parametrize("mode", ["symmetric", "zero_point"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_scheme_of_ours_means_to_stock_what_it_means_to_us(
    mode: str, bits: int
) -> None:
    weight = format_cases.any_weight(mode, bits, 64, N, K, dtype="float32", seed=9)
    packed = packed_of(*weight.native, **weight.options)
    x = X.astype(mx.float32)

    y = mlx_marlin.quantized_matmul(x, packed)

    stock = mx.quantized_matmul(x, *as_mlx(packed), group_size=64, bits=bits)
    assert_close(y, stock, rtol=1e-5)
    dx = mx.grad(loss(mlx_marlin.quantized_matmul, packed))(x)
    dy = 2 * y / y.size
    assert_close(dx, mx.array((oracles.exact(dy) @ weight.decoded).astype("f4")), 1e-5)


OURS = ("affine", "symmetric", "zero_point")
PACKED_GROUPS = (16, 256, 320)
"""Group sizes of ours; a row of 320 has one group, or for stock MLX five."""


def row_of(group_size: int) -> int:
    """Returns a k for a group size."""
    return 320 if group_size != 256 else 512


@pytest.mark.parametrize(
    ("mode", "group_size"),
    [
        ("symmetric", 64),
        ("zero_point", 64),
        *((mode, group_size) for mode in OURS for group_size in PACKED_GROUPS),
    ],
)
@pytest.mark.parametrize("transpose", [True, False])
def test_without_kernels_stock_serves_a_format_of_ours(
    backend: Choose, mode: str, group_size: int, transpose: bool
) -> None:
    k = row_of(group_size)
    weight = format_cases.any_weight(mode, 4, group_size, N, k, dtype="float16", seed=9)
    packed = mlx_marlin.pack(*weight.native, **weight.options)
    x = mx.random.normal((3, k if transpose else N), key=mx.random.key(1))
    x = x.astype(mx.float16)
    backend("stock")

    y = mlx_marlin.quantized_matmul(x, packed, transpose=transpose)

    assert mlx_marlin.why_not(x, packed, transpose=transpose) is not None
    decoded = weight.decoded.T if transpose else weight.decoded
    assert y.dtype == mx.float16
    assert oracles.error(y, oracles.exact(x) @ decoded) < 1e-2


@sampled(1, 4)
@pytest.mark.parametrize("group_size", PACKED_GROUPS)
@pytest.mark.parametrize("mode", OURS)
def test_a_group_size_of_ours_is_multiplied_and_has_gradients(
    mode: str, group_size: int
) -> None:
    k = row_of(group_size)
    weight = format_cases.any_weight(mode, 4, group_size, N, k, dtype="float32", seed=9)
    packed = mlx_marlin.pack(*weight.native, **weight.options)
    x = mx.random.normal((3, k), key=mx.random.key(1))
    bias = mx.random.normal((N,), key=mx.random.key(2))
    exact, decoded = oracles.exact(x), weight.decoded

    def of(x: mx.array, scales: mx.array) -> mx.array:
        fields = {**weight.options, "words": packed.words, "n": N, "k": k}
        again = mlx_marlin.PackedWeight(**fields, scales=scales)
        return mlx_marlin.quantized_matmul(x, again).square().sum()

    y = mlx_marlin.linear(x, packed, bias=bias, activation="silu")
    back = mlx_marlin.quantized_matmul(x[:, :N], packed, transpose=False)
    dx, dscales = mx.grad(of, argnums=(0, 1))(x, packed.scales)

    assert mlx_marlin.why_not(x, packed) is None
    total = exact @ decoded.T + oracles.exact(bias)
    assert oracles.error(y, total / (1 + np.exp(-total))) < 1e-5
    assert oracles.error(back, exact[:, :N] @ decoded) < 1e-5
    assert oracles.error(dx, 2 * exact @ decoded.T @ decoded) < 1e-5
    # The loss is quadratic in what a group stores, or in all but the zero points.
    stored = oracles.exact(packed.scales)
    slope = oracles.exact(dscales) * stored
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
    assert {mode for mode, _ in FORMATS} - {*MLX_MODES} == {
        "symmetric",
        "zero_point",
        "k_quant",
        "codebook",
        "k_codebook",
    }
