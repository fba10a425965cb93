"""Stock MLX computes with the exact weights where biases cannot hold a zero point."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_marlin import gather_qmm, linear, optimize, pack, quantized_matmul, restore
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.products.reference.weight import dequantize
from mlx_marlin.weights.bit_streams import words_of_codes
from mlx_marlin.weights.dtypes import dtype_name
from mlx_marlin.weights.packed_weight import PackedWeight
from support import oracles
from support.choose import Choose
from support.models import Layers

N, K = 64, 256
CODES = [(251, "zero_point"), (128, "symmetric")]


@pytest.fixture(autouse=True)
def _stock(backend: Choose) -> None:
    backend("stock")


def packed_of(
    dtype: mx.Dtype, *batch: int, zero: int = 251, mode: str = "zero_point"
) -> PackedWeight:
    """A weight of -1, 0 and 1 scale: a rounded bias would be off by several percent."""
    rng = np.random.default_rng(0)
    codes = zero + rng.integers(-1, 2, (*batch, N, K))
    groups = (*batch, N, K // 64)
    scales = mx.array(rng.uniform(0.01, 0.02, groups)).astype(dtype)
    return pack(
        words_of_codes(mx.array(codes.astype(np.uint8)), 8),
        scales,
        None if mode == "symmetric" else mx.full(groups, zero).astype(dtype),
        group_size=64,
        bits=8,
        mode=mode,
    )


def exact(x: mx.array, packed: PackedWeight) -> oracles.Floats:
    w = oracles.exact(dequantize(packed, mx.float32))
    return oracles.exact(x) @ w.swapaxes(-1, -2)


@pytest.mark.parametrize(("zero", "mode"), CODES)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_products_and_experts(dtype: mx.Dtype, zero: int, mode: str) -> None:
    packed = packed_of(dtype, zero=zero, mode=mode)
    experts = packed_of(dtype, 2, zero=zero, mode=mode)
    x = mx.random.normal((3, K), key=mx.random.key(0)).astype(dtype)
    tolerance = oracles.TOLERANCES[dtype_name(dtype)]
    for y in (
        quantized_matmul(x, packed),
        linear(x, packed, residual=mx.zeros((3, N))),
    ):
        assert y.dtype == dtype
        assert oracles.error(y, exact(x, packed)) < tolerance
    # dtypes are promoted as elsewhere
    assert quantized_matmul(x.astype(mx.float32), packed).dtype == mx.float32
    y = gather_qmm(x[:, None], experts, rhs_indices=mx.array([1, 0, 1], mx.uint32))
    assert y.dtype == dtype
    both = exact(x, experts)
    expected = np.stack([both[expert, row] for row, expert in enumerate((1, 0, 1))])
    assert oracles.error(y.squeeze(1), expected) < tolerance


@pytest.mark.parametrize(("zero", "rounds"), [(251, True), (128, False)])
def test_restoring_warns_if_it_rounds(
    zero: int, rounds: bool, recwarn: pytest.WarningsRecorder
) -> None:
    layer = MarlinLinear.from_packed(packed_of(mx.float16, zero=zero))
    model = optimize(Layers(layer))
    assert not recwarn
    restore(model)
    said = [str(warning.message) for warning in recwarn]
    assert [("restore rounds weights" in text) for text in said] == [True] * rounds
    stock = model.layers[0]
    parts = (array.astype(mx.float32) for array in (stock.scales, stock.biases))
    back = mx.dequantize(stock.weight, *parts, 64, 8)
    assert mx.array_equal(back, dequantize(layer.packed, mx.float32)) != rounds
