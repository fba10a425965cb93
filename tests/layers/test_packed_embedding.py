"""An embedding in a packed format looks up exact rows and heads a tied model."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_marlin.layers.embedding import PackedEmbedding
from support import format_cases, oracles
from support.format_calls import NOT_IN_MLX
from support.format_cases import GROUPED
from support.packed_codes import SEEDS, packed_of, packed_weights
from support.profiles import sampled
from support.strategies import Grouped

N, K = 77, 256


@given(
    grouped=st.sampled_from(GROUPED),
    tokens=st.lists(st.integers(0, N - 1), max_size=9),
    seed=SEEDS,
)
@settings(max_examples=40)
def test_rows_of_every_format_are_those_of_the_whole_weight(
    grouped: Grouped, tokens: list[int], seed: int
) -> None:
    k = 2 * format_cases.step_of(*grouped)
    weight = format_cases.any_weight(*grouped, N, k, dtype="float32", seed=seed)
    layer = PackedEmbedding.from_packed(packed_of(weight), mx.float32)

    rows = layer(mx.array(tokens, mx.uint32))

    assert rows.shape == (len(tokens), k)
    scale, value, bias = (part[tokens] for part in weight.parts)
    rounding = 2.0**-23 * (np.abs(scale * value) + np.abs(bias)) + 1e-44
    assert np.all(np.abs(oracles.exact(rows) - weight.decoded[tokens]) <= rounding)


@sampled(2)
@pytest.mark.parametrize("grouped", NOT_IN_MLX, ids=str)
@pytest.mark.usefixtures("kernels")
def test_the_tied_head_is_the_product_with_the_weight(grouped: Grouped) -> None:
    k = 2 * format_cases.step_of(*grouped)
    packed, decoded = packed_weights(grouped, n=N, k=k, dtype="float16")
    layer = PackedEmbedding.from_packed(packed, mx.bfloat16)
    x = mx.random.normal((2, 3, k), key=mx.random.key(1)).astype(mx.float16)

    y = layer.as_linear(x)

    assert (y.shape, y.dtype) == ((2, 3, N), mx.float16)
    assert oracles.error(y, oracles.exact(x) @ decoded.T) < 1e-3


def test_tokens_of_any_shape_and_dtype() -> None:
    packed, _ = packed_weights(("k_quant", 6, 16), n=N, k=K)
    layer = PackedEmbedding.from_packed(packed, mx.bfloat16)
    for dtype in (mx.int32, mx.uint32, mx.int64):
        rows = layer(mx.array([[1, 76], [0, 1]], dtype))
        assert (rows.shape, rows.dtype) == ((2, 2, K), mx.bfloat16)
        assert mx.array_equal(rows[0, 0], rows[1, 1])
    assert layer(mx.zeros((2, 0), mx.int32)).shape == (2, 0, K)
    assert (layer.invariant, layer.is_packed_only) == (False, True)


def test_wrong_weights_are_refused() -> None:
    with pytest.raises(TypeError, match="packed must be a PackedWeight, got array"):
        PackedEmbedding.from_packed(mx.zeros((N, K)), mx.float16)
    batch, _ = packed_weights(("symmetric", 4, 64), 2, n=N, k=K)
    with pytest.raises(ValueError, match=r"batch=\(2,\).*expected one weight"):
        PackedEmbedding.from_packed(batch, mx.float16)
