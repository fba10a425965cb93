"""Products with K-quants and codebooks: on kernels, on stock MLX, and as layers."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_marlin
from mlx_marlin.backends import planner
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.planning.problem import problem_of
from support import format_cases, format_oracle, oracles
from support.choose import Choose
from support.format_cases import Weight
from support.packed_codes import SEEDS, packed_of

Kind = tuple[str, int, int]
KINDS: list[Kind] = [
    ("k_quant", 2, 16),
    ("k_quant", 3, 16),
    ("k_quant", 4, 32),
    ("k_quant", 5, 32),
    ("k_quant", 6, 16),
    ("k_codebook", 4, 32),
    ("codebook", 4, 64),
]
N, K = 45, 512
DTYPES = ("float16", "bfloat16", "float32")
kinds = pytest.mark.parametrize("kind", KINDS)


def weight_of(
    kind: Kind, n: int = N, k: int = K, seed: int = 0, dtype: str = "float16"
) -> Weight:
    return format_cases.any_weight(*kind, n, k, dtype=dtype, seed=seed)


def rows(*shape: int, dtype: str = "float16", seed: int = 1) -> mx.array:
    drawn = mx.random.normal(shape, key=mx.random.key(seed))
    return drawn.astype(getattr(mx, dtype))


@kinds
@given(
    m=st.integers(1, 20),
    n=st.integers(1, 70),
    blocks=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    seed=SEEDS,
)
@settings(max_examples=8)
@pytest.mark.usefixtures("kernels")
def test_products_are_those_of_the_exact_weight(
    kind: Kind, m: int, n: int, blocks: int, dtype: str, seed: int
) -> None:
    weight = weight_of(kind, n, 256 * blocks, seed, dtype)
    packed, x = packed_of(weight), rows(m, 256 * blocks, dtype=dtype, seed=seed)

    y = mlx_marlin.quantized_matmul(x, packed)

    assert mlx_marlin.why_not(x, packed) is None
    format_oracle.assert_close(y, x, weight, operand="offset", dtype=dtype)


@kinds
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stock_mlx_serves_without_kernels_in_the_dtype_of_x(
    kind: Kind, dtype: str, transpose: bool, backend: Choose
) -> None:
    weight = weight_of(kind, dtype=dtype)
    x = rows(3, K if transpose else N, dtype=dtype)
    backend("stock")

    y = mlx_marlin.quantized_matmul(x, packed_of(weight), transpose=transpose)

    decoded = weight.decoded.T if transpose else weight.decoded
    expected = oracles.exact(x) @ decoded
    assert y.dtype == x.dtype
    limit = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 1e-6}[dtype]
    assert oracles.error(y, expected) < limit


@kinds
@pytest.mark.usefixtures("kernels")
def test_gradients_of_x_are_exact_and_scales_have_none(kind: Kind) -> None:
    weight = weight_of(kind)
    packed, x = packed_of(weight), rows(2, K, dtype="float32")

    def loss(x: mx.array) -> mx.array:
        return mlx_marlin.quantized_matmul(x, packed).square().sum()

    dx = mx.grad(loss)(x)

    exact = oracles.exact(x)
    expected = 2 * exact @ weight.decoded.T @ weight.decoded
    assert oracles.error(dx, expected) < 1e-5


@kinds
@pytest.mark.usefixtures("kernels")
def test_rows_have_the_same_bits_alone_and_among_others(kind: Kind) -> None:
    packed, x = packed_of(weight_of(kind)), rows(9, K)

    whole = mlx_marlin.linear(x, packed, invariant=True)

    for row in range(9):
        alone = mlx_marlin.linear(x[row : row + 1], packed, invariant=True)
        assert mx.array_equal(alone, whole[row : row + 1])


@kinds
@pytest.mark.usefixtures("kernels")
def test_layers_and_their_stock_layers_compute_the_same(kind: Kind) -> None:
    weight = weight_of(kind)
    packed, bias = packed_of(weight), rows(N, seed=2)
    x = rows(5, K)
    layer = MarlinLinear.from_packed(packed, bias)

    y = layer(x)

    expected = oracles.exact(x) @ weight.decoded.T + oracles.exact(bias)
    assert y.dtype == mx.float16
    assert oracles.error(y, expected) < 1e-3
    assert oracles.error(layer.to_stock()(x), expected) < 1e-3


@kinds
@pytest.mark.parametrize("name", ["kernels", "stock"])
def test_experts(kind: Kind, name: str, request: pytest.FixtureRequest) -> None:
    if name == "stock":
        request.getfixturevalue("backend")("stock")
    else:
        request.getfixturevalue("kernels")
    weight = weight_of(kind, 3 * 40)
    native = (each.reshape(3, 40, -1) for each in weight.native)
    packed = mlx_marlin.pack(*native, **weight.options)
    layer = MarlinSwitchLinear.from_packed(packed)
    x = rows(4, 1, 1, K)
    indices = mx.array([[0, 2], [1, 1], [2, 0], [0, 1]], mx.uint32)

    y = layer(x, indices)

    decoded = weight.decoded.reshape(3, 40, K)[np.array(indices)]
    expected = np.einsum("mk,mcnk->mcn", oracles.exact(x)[:, 0, 0], decoded)
    assert y.dtype == mx.float16
    assert oracles.error(y.squeeze(-2), expected) < 1e-3


@kinds
@pytest.mark.usefixtures("kernels")
def test_a_batch_of_weights(kind: Kind) -> None:
    weight = weight_of(kind, 3 * 40)
    native = (each.reshape(3, 40, -1) for each in weight.native)
    packed = mlx_marlin.pack(*native, **weight.options)
    x = rows(3, 2, K)

    y = mlx_marlin.quantized_matmul(x, packed)

    decoded = weight.decoded.reshape(3, 40, K)
    expected = np.einsum("bmk,bnk->bmn", oracles.exact(x), decoded)
    assert oracles.error(y, expected) < 1e-3


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_decoded_and_rounded_once(kind: Kind, dtype: str) -> None:
    weight = weight_of(kind)

    w = mlx_marlin.dequantize(packed_of(weight), getattr(mx, dtype))

    # Float32 rounds both terms of a weight: the codes of 6 bits have an offset.
    scale, value, bias = map(np.abs, weight.parts)
    terms = 2.0**-23 * (scale * (value + 32) + bias)
    rounding = oracles.ROUNDING[dtype] * np.abs(weight.decoded)
    off = np.abs(oracles.exact(w) - weight.decoded)
    assert np.all(off <= terms + rounding + oracles.SMALLEST[dtype])


@kinds
def test_other_gpus_say_that_they_have_no_kernel(kind: Kind) -> None:
    mode, bits, group_size = kind
    problem = problem_of(4, 64, 256, mode=mode, bits=bits, layout="marlin")
    assert problem.group_size == group_size
    with pytest.raises(ValueError, match=r"K-quants|codebooks"):
        planner.plan(
            4, 64, 256, mode=mode, bits=bits, layout="marlin", chip="NVIDIA H200"
        )
