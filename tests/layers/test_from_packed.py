"""Layers take packed weights of formats that MLX does not have."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_marlin import pack
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.products.dequantizing import dequantize
from mlx_marlin.weights.bit_streams import words_of_codes
from mlx_marlin.weights.packed_weight import PackedWeight
from support import oracles
from support.profiles import sampled

N, K, EXPERTS = 96, 256, 3


def packed_of(
    mode: str, *batch: int, group_size: int = 64, bits: int = 4
) -> PackedWeight:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**bits, (*batch, N, K), np.uint8)
    groups = (*batch, N, K // group_size)
    scales = mx.array(rng.uniform(0.01, 0.02, groups).astype(np.float16))
    zeros = mx.array(rng.integers(0, 2**bits, groups).astype(np.float16))
    return pack(
        words_of_codes(mx.array(codes), bits),
        scales,
        None if mode == "symmetric" else zeros,
        group_size=group_size,
        bits=bits,
        mode=mode,
    )


def rows(*shape: int) -> mx.array:
    return mx.random.normal((*shape, K), key=mx.random.key(1)).astype(mx.float16)


def exact(x: mx.array, w: mx.array) -> np.ndarray:
    return np.array(x, np.float64) @ np.array(w, np.float64).T


@sampled(4)
@pytest.mark.parametrize("mode", ["symmetric", "zero_point"])
@pytest.mark.parametrize("group_size", [16, 64, 256])
@pytest.mark.parametrize("m", [1, 5])
def test_a_linear_layer_of_any_format(m: int, group_size: int, mode: str) -> None:
    packed = packed_of(mode, group_size=group_size, bits=3)
    bias = mx.random.normal((N,), key=mx.random.key(2)).astype(mx.float16)
    x = rows(m)

    y = MarlinLinear.from_packed(packed, bias)(x)

    assert y.dtype == mx.float16
    expected = exact(x, dequantize(packed, mx.float32)) + np.array(bias, np.float64)
    assert oracles.error(y, expected) < 1e-3


@pytest.mark.parametrize("mode", ["symmetric", "zero_point"])
def test_experts_of_any_format(mode: str) -> None:
    packed = packed_of(mode, EXPERTS)
    bias = mx.random.normal((EXPERTS, N), key=mx.random.key(2)).astype(mx.float16)
    x = rows(4, 1, 1)
    indices = mx.array([[0, 2], [1, 1], [2, 0], [0, 1]], mx.uint32)

    y = MarlinSwitchLinear.from_packed(packed, bias)(x, indices)

    weights = np.array(dequantize(packed, mx.float32), np.float64)
    chosen = np.array(indices)
    expected = np.einsum(
        "mk,mcnk->mcn", np.array(x[:, 0, 0], np.float64), weights[chosen]
    )
    expected += np.array(bias, np.float64)[chosen]
    assert oracles.error(y.squeeze(-2), expected) < 1e-3


def test_features_are_gathered_in_the_order_of_the_columns() -> None:
    packed = packed_of("zero_point")
    order = mx.array(np.random.default_rng(3).permutation(K).astype(np.int32))
    layer = ReorderedLinear(MarlinLinear.from_packed(packed), order)
    x = rows(2, 3)

    y = layer(x)

    gathered = np.array(x)[..., np.array(order)]
    expected = exact(gathered, dequantize(packed, mx.float32))
    assert oracles.error(y, expected) < 1e-3
    assert not tree_flatten(layer.trainable_parameters())


@pytest.mark.parametrize("order", [mx.zeros(K, mx.int32), mx.arange(K - 1)])
def test_an_order_that_is_no_permutation_is_refused(order: mx.array) -> None:
    layer = MarlinLinear.from_packed(packed_of("symmetric"))
    with pytest.raises(ValueError, match="expected a permutation of 256 features"):
        ReorderedLinear(layer, order)


def test_wrong_weights_are_refused() -> None:
    with pytest.raises(TypeError, match="packed must be a PackedWeight, got array"):
        MarlinLinear.from_packed(mx.zeros((N, K)))
    with pytest.raises(ValueError, match=r"batch=\(3,\).*expected one weight"):
        MarlinLinear.from_packed(packed_of("symmetric", EXPERTS))
    with pytest.raises(ValueError, match=r"bias has shape \(5,\), expected \(96,\)"):
        MarlinLinear.from_packed(packed_of("symmetric"), mx.zeros(5))
    with pytest.raises(ValueError, match=r"batch=\(\).*expected \(experts,\)"):
        MarlinSwitchLinear.from_packed(packed_of("symmetric"))
    with pytest.raises(ValueError, match=r"bias has shape \(96,\), expected \(3, 96\)"):
        MarlinSwitchLinear.from_packed(packed_of("symmetric", EXPERTS), mx.zeros(N))


@pytest.mark.parametrize("mode", ["symmetric", "zero_point"])
def test_other_options_keep_the_packed_bits(mode: str) -> None:
    linear = MarlinLinear.from_packed(packed_of(mode))
    experts = MarlinSwitchLinear.from_packed(packed_of(mode, EXPERTS))
    for layer in (linear, experts):
        other = type(layer).from_quantized(layer, layout="marlin", invariant=True)
        assert other.invariant
        assert not layer.invariant
        assert other.mode == mode
        assert mx.array_equal(other["words"], layer["words"])
        assert mx.array_equal(other["packed_scales"], layer["packed_scales"])


@pytest.mark.parametrize("mode", ["symmetric", "zero_point"])
def test_stock_layers_compute_with_biases_for_zero_points(mode: str) -> None:
    x = rows(4)
    linear = MarlinLinear.from_packed(packed_of(mode)).to_stock()
    assert linear.mode == "affine"
    expected = exact(x, dequantize(packed_of(mode), mx.float32))
    assert oracles.error(linear(x), expected) < 5e-3  # biases are rounded

    packed = packed_of(mode, EXPERTS)
    experts = MarlinSwitchLinear.from_packed(packed).to_stock()
    y = experts(x[:, None, None], mx.array([[0], [1], [2], [1]]))
    weights = dequantize(packed, mx.float32)
    for i, expert in enumerate((0, 1, 2, 1)):
        assert (
            oracles.error(y[i].reshape(-1), exact(x[i], weights[expert])) < 5e-3
        )  # biases are rounded


@pytest.mark.parametrize("cls", [MarlinLinear, MarlinSwitchLinear])
def test_a_packed_layer_and_its_stock_layer_are_frozen(cls: Any) -> None:
    batch = (EXPERTS,) if cls is MarlinSwitchLinear else ()
    layer = cls.from_packed(packed_of("symmetric", *batch))

    for own in (layer, layer.to_stock()):
        assert own.parameters()
        assert not own.trainable_parameters()


def test_experts_in_groups_that_mlx_lacks_have_no_stock_layer() -> None:
    experts = MarlinSwitchLinear.from_packed(
        packed_of("symmetric", EXPERTS, group_size=16)
    )
    with pytest.raises(ValueError, match="MLX has no experts in groups of 16"):
        experts.to_stock()
