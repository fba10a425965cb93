"""Layers take packed weights of formats that MLX does not have."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.weights.packed_weight import PackedWeight
from support import format_cases, oracles
from support.format_calls import NOT_IN_MLX
from support.packed_codes import packed_weights
from support.profiles import sampled
from support.strategies import Grouped

N, K, EXPERTS = 96, 256, 3
FLOAT_SCALES = ("affine", "symmetric", "zero_point")
"""Modes that become MLX's affine one."""


def packed_of(mode: str, *batch: int, group_size: int = 64) -> PackedWeight:
    form = mode, 4, group_size
    return packed_weights(form, *batch, n=N, k=K, dtype="float16")[0]


def rows(*shape: int) -> mx.array:
    return mx.random.normal((*shape, K), key=mx.random.key(1)).astype(mx.float16)


@sampled(5)
@pytest.mark.parametrize("grouped", NOT_IN_MLX, ids=str)
@pytest.mark.parametrize("m", [1, 5])
def test_linear_layers_of_any_format_and_their_stock_layers(
    m: int, grouped: Grouped
) -> None:
    k = 2 * format_cases.step_of(*grouped)
    packed, decoded = packed_weights(grouped, n=N, k=k, dtype="float16")
    bias = mx.random.normal((N,), key=mx.random.key(2)).astype(mx.float16)
    x = mx.random.normal((m, k), key=mx.random.key(1)).astype(mx.float16)
    layer = MarlinLinear.from_packed(packed, bias)

    y = layer(x)

    assert y.dtype == mx.float16
    expected = oracles.exact(x) @ decoded.T + oracles.exact(bias)
    assert oracles.error(y, expected) < 1e-3
    stock, integers = layer.to_stock(), grouped[0] in FLOAT_SCALES
    # Biases are rounded, which stand for zero points.
    assert oracles.error(stock(x), expected) < (5e-3 if integers else 1e-3)
    if integers and grouped[1:] == (4, 64):
        assert stock.mode == "affine"


@sampled(1, 3)
@pytest.mark.parametrize(
    "grouped",
    [
        *(("symmetric", 4, 64), ("zero_point", 4, 64)),
        ("k_quant", 4, 32),
    ],
    ids=str,
)
def test_experts_of_any_format_and_their_stock_layers(grouped: Grouped) -> None:
    packed, decoded = packed_weights(grouped, EXPERTS, n=N, k=K, dtype="float16")
    bias = mx.random.normal((EXPERTS, N), key=mx.random.key(2)).astype(mx.float16)
    x = rows(4, 1, 1)
    indices = mx.array([[0, 2], [1, 1], [2, 0], [0, 1]], mx.uint32)
    layer = MarlinSwitchLinear.from_packed(packed, bias)

    y = layer(x, indices)

    chosen = np.array(indices)
    expected = np.einsum("mk,mcnk->mcn", oracles.exact(x)[:, 0, 0], decoded[chosen])
    expected += oracles.exact(bias)[chosen]
    assert oracles.error(y.squeeze(-2), expected) < 1e-3
    y = layer.to_stock()(x, indices)
    assert oracles.error(y.squeeze(-2), expected) < 5e-3


def test_features_are_gathered_in_the_order_of_the_columns() -> None:
    packed, decoded = packed_weights(("zero_point", 4, 64), n=N, k=K, dtype="float16")
    order = mx.array(np.random.default_rng(3).permutation(K).astype(np.int32))
    layer = ReorderedLinear(MarlinLinear.from_packed(packed), order)
    x = rows(2, 3)

    y = layer(x)

    expected = oracles.exact(x)[..., np.array(order)] @ decoded.T
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
    assert MarlinLinear.from_packed(packed_of(mode), invariant=True).invariant
    for layer in (linear, experts):
        other = type(layer).from_quantized(layer, layout="marlin", invariant=True)
        assert (other.invariant, layer.invariant) == (True, False)
        assert other.mode == mode
        assert mx.array_equal(other["words"], layer["words"])
        assert mx.array_equal(other["packed_scales"], layer["packed_scales"])


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
