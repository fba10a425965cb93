"""`MarlinLinear` behaves as MLX's layer, and multiplies by our kernels."""

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.planning.plan import Plan
from mlx_marlin.weights.packed_weight import PackedWeight
from support import oracles

LAYOUTS = ["mlx", "marlin"]
K, N = 192, 40


def stock_layer(*, bias: bool = True, **format: Any) -> nn.QuantizedLinear:
    mx.random.seed(0)
    layer = nn.QuantizedLinear(K, N, bias, **format)
    if bias:
        layer.bias = mx.random.normal((N,))
    return layer


def parameters(layer: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(layer.parameters()))


def assert_same_arrays(
    actual: dict[str, mx.array], expected: dict[str, mx.array]
) -> None:
    assert [*actual] == [*expected]
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        assert mx.array_equal(actual[name], array)


def native(layer: nn.Module) -> tuple[mx.array, ...]:
    return layer.weight, layer.scales, layer.biases


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_computes_what_mlxs_does(
    ran: list[Plan], layout: str, group_size: int
) -> None:
    stock = stock_layer(bias=False, group_size=group_size)
    ours = MarlinLinear.from_quantized(stock, layout=layout)
    x = mx.random.normal((2, 3, K))

    y = ours(x)

    oracles.assert_close(y, stock(x), x, native(stock), group_size=group_size)
    assert [plan.problem.layout for plan in ran] == [layout]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bias_is_added_in_the_kernel(ran: list[Plan], layout: str) -> None:
    stock = stock_layer()
    x = mx.random.normal((2, 3, K))

    y = MarlinLinear.from_quantized(stock, layout=layout)(x)

    bias = stock.pop("bias")
    bare = MarlinLinear.from_quantized(stock, layout=layout)(x)
    assert mx.allclose(y, bare + bias, rtol=1e-6, atol=1e-6)
    assert [plan.problem.epilogue.bias for plan in ran] == [True, False]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wider_bias_widens_the_result_as_in_mlxs_layer(
    ran: list[Plan], layout: str
) -> None:
    stock = stock_layer()
    stock.set_dtype(mx.float16)
    stock.bias = stock.bias.astype(mx.float32)
    x = mx.random.normal((3, K)).astype(mx.float16)

    y = MarlinLinear.from_quantized(stock, layout=layout)(x)

    assert y.dtype == stock(x).dtype == mx.float32
    assert mx.allclose(y, stock(x), rtol=1e-2, atol=1e-2)
    assert [plan.problem.epilogue.bias for plan in ran] == [False]


def test_with_mlxs_layout_the_parameters_are_mlxs_own_arrays() -> None:
    stock = stock_layer()

    ours = MarlinLinear.from_quantized(stock)

    assert [*parameters(ours)] == ["weight", "scales", "biases", "bias"]
    for name, array in parameters(stock).items():
        assert ours[name] is array
    assert ours.packed is None


def test_with_our_layout_the_native_arrays_are_unpacked_when_asked_for() -> None:
    stock = stock_layer()

    ours = MarlinLinear.from_quantized(stock, layout="marlin")

    assert sorted(parameters(ours)) == ["bias", "packed_scales", "words"]
    assert isinstance(ours.packed, PackedWeight)
    assert ours.packed.words is ours["words"]
    for name in ("weight", "scales", "biases"):
        assert name not in ours
        assert mx.array_equal(getattr(ours, name), stock[name])
    decoded = mx.dequantize(ours.weight, ours.scales, ours.biases, 64, 4)
    assert mx.array_equal(
        decoded, mx.dequantize(stock.weight, stock.scales, stock.biases, 64, 4)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_is_mlxs_to_whoever_asks(layout: str) -> None:
    stock = stock_layer()

    ours = MarlinLinear.from_quantized(stock, layout=layout)

    assert isinstance(ours, nn.QuantizedLinear)
    assert (ours.group_size, ours.bits, ours.mode) == (64, 4, "affine")
    inside = repr(stock).removeprefix("QuantizedLinear(").removesuffix(")")
    assert repr(ours) == f"MarlinLinear({inside}, layout={layout})"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_frozen_and_the_mode_survive_the_way_there_and_back(
    layout: str,
) -> None:
    stock = stock_layer()
    stock.unfreeze(keys=["bias"])
    stock.eval()

    ours = MarlinLinear.from_quantized(stock, layout=layout)

    assert [*ours.trainable_parameters()] == ["bias"]
    assert not ours.training
    back = ours.to_stock()
    assert [*back.trainable_parameters()] == ["bias"]
    assert not back.training
    ours.freeze()
    assert [*stock.trainable_parameters()] == ["bias"]


def test_codes_cannot_be_assigned_over_a_packed_weight() -> None:
    stock = stock_layer()
    ours = MarlinLinear.from_quantized(stock, layout="marlin")

    with pytest.raises(TypeError, match="weight of a layer"):
        ours.weight = mx.zeros_like(stock.weight)

    assert mx.array_equal(ours.weight, stock.weight)


def test_new_native_parameters_are_used_at_once(ran: list[Plan]) -> None:
    ours = MarlinLinear.from_quantized(stock_layer())
    x = mx.random.normal((3, K))
    before = ours(x)
    ours.scales = 2 * ours.scales
    ours.biases = 2 * ours.biases
    ours.bias = 2 * ours.bias

    assert mx.allclose(ours(x), 2 * before, atol=1e-5)
    assert len(ran) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_change_of_dtype_reaches_the_scales(ran: list[Plan], layout: str) -> None:
    ours = MarlinLinear.from_quantized(stock_layer(), layout=layout)

    ours.set_dtype(mx.float16)

    assert ours.scales.dtype == mx.float16
    assert ours(mx.zeros((2, K), mx.float16)).dtype == mx.float16
    assert ran[0].problem.scale_dtype == "float16"


def test_packed_weights_are_loaded_by_their_like_and_mlxs_are_refused() -> None:
    stock = stock_layer()
    packed = parameters(MarlinLinear.from_quantized(stock, layout="marlin"))

    ours = MarlinLinear(K, N, layout="marlin")
    ours.load_weights([*packed.items()])

    assert_same_arrays(parameters(ours.to_stock()), parameters(stock))
    with pytest.raises(ValueError, match="parameters not in model"):
        nn.QuantizedLinear(K, N).load_weights([*packed.items()])
    with pytest.raises(ValueError, match="parameters not in model"):
        ours.load_weights([*parameters(stock).items()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 7}, "'affine' with bits=7 is not one"),
        ({"bits": 4, "mode": "mxfp5"}, "mode='mxfp5' is not one"),
        ({"layout": "rows"}, r"layout='rows' is not one of .*marlin"),
    ],
)
def test_formats_and_layouts_that_are_not_ours_are_refused(
    options: dict[str, Any], message: str
) -> None:
    makers = [partial(MarlinLinear, K, N)]
    makers.append(partial(MarlinLinear.from_linear, nn.Linear(K, N)))
    if "layout" in options:
        makers.append(partial(MarlinLinear.from_quantized, stock_layer()))
    for make in makers:
        with pytest.raises(ValueError, match=message):
            make(**options)
