"""`MarlinLinear` behaves as MLX's layer, and multiplies by our kernels."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_marlin.layers.embedding import MarlinEmbedding
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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_back_at_mlx_every_array_is_as_it_was(layout: str, bias: bool) -> None:
    stock = stock_layer(bias=bias)

    back = MarlinLinear.from_quantized(stock, layout=layout).to_stock()

    assert type(back) is nn.QuantizedLinear
    assert_same_arrays(parameters(back), parameters(stock))
    assert vars(back) == vars(stock)
    assert repr(back) == repr(stock)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_is_mlxs_to_whoever_asks(layout: str) -> None:
    stock = stock_layer()

    ours = MarlinLinear.from_quantized(stock, layout=layout)

    assert isinstance(ours, nn.QuantizedLinear)
    assert (ours.group_size, ours.bits, ours.mode) == (64, 4, "affine")
    inside = repr(stock).removeprefix("QuantizedLinear(").removesuffix(")")
    assert repr(ours) == f"MarlinLinear({inside}, layout={layout})"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_made_from_scratch_it_is_frozen_and_has_mlxs_defaults(layout: str) -> None:
    ours = MarlinLinear(K, N, layout=layout)

    assert ours.trainable_parameters() == {}
    assert (ours.group_size, ours.bits, ours.mode) == (64, 4, "affine")
    assert ours.bias.shape == (N,)
    assert ours(mx.zeros((2, K))).shape == (2, N)
    assert "bias" not in MarlinLinear(K, N, False, 32, 4, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", [3, 4])
def test_a_layer_knows_its_features(layout: str, bits: int) -> None:
    ours = MarlinLinear(K, N, bits=bits, layout=layout)

    assert (ours.input_dims, ours.output_dims) == (K, N)


@pytest.mark.parametrize("options", [{}, {"group_size": 32}, {"bits": 4}])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_linear_quantizes_as_mlx_does(
    layout: str, options: dict[str, int]
) -> None:
    linear = nn.Linear(K, N)

    ours = MarlinLinear.from_linear(linear, layout=layout, **options)

    stock = nn.QuantizedLinear.from_linear(linear, **options)
    assert_same_arrays(parameters(ours.to_stock()), parameters(stock))
    assert ours.group_size == stock.group_size


@pytest.mark.parametrize("bits", [7, 9])
def test_formats_that_are_not_ours_are_refused(bits: int) -> None:
    for make in (
        lambda: MarlinLinear(K, N, bits=bits),
        lambda: MarlinLinear.from_linear(nn.Linear(K, N), bits=bits),
    ):
        with pytest.raises(ValueError, match=f"'affine' with bits={bits} is not one"):
            make()
    with pytest.raises(ValueError, match="mode='mxfp5' is not one"):
        MarlinLinear(K, N, bits=4, mode="mxfp5")


@pytest.mark.parametrize(
    "make",
    [
        lambda: MarlinLinear(K, N, layout="rows"),
        lambda: MarlinLinear.from_linear(nn.Linear(K, N), layout="rows"),
        lambda: MarlinLinear.from_quantized(stock_layer(), layout="rows"),
    ],
)
def test_an_unknown_layout_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"layout='rows' is not one of .*marlin"):
        make()


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_is_independent(layout: str) -> None:
    ours = MarlinLinear.from_quantized(stock_layer(), layout=layout)
    x = mx.random.normal((2, K))

    twin = copy.deepcopy(ours)
    twin.bias = twin.bias + 1

    assert twin.layout == layout
    assert mx.allclose(twin(x), ours(x) + 1, atol=1e-5)


def test_weights_saved_by_one_are_loaded_by_the_other(tmp_path: Path) -> None:
    file = str(tmp_path / "layer.safetensors")
    stock, other = stock_layer(), nn.QuantizedLinear(K, N)

    MarlinLinear.from_quantized(stock).save_weights(file)
    other.load_weights(file)
    ours = MarlinLinear(K, N)
    ours.load_weights(file)

    assert_same_arrays(parameters(other), parameters(stock))
    assert_same_arrays(parameters(ours), parameters(stock))


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


def test_an_embedding_is_looked_up_by_mlx_and_multiplied_by_us(
    ran: list[Plan],
) -> None:
    stock = nn.QuantizedEmbedding(50, K)
    ours = MarlinEmbedding.from_quantized(stock)
    tokens = mx.array([[3, 49], [0, 3]])
    x = mx.random.normal((2, 3, K))

    assert mx.array_equal(ours(tokens), stock(tokens))
    assert ran == []
    y = ours.as_linear(x)

    oracles.assert_close(y, stock.as_linear(x), x, native(stock), group_size=64)
    assert [plan.problem.n for plan in ran] == [50]
    assert isinstance(ours, nn.QuantizedEmbedding)
    for name, array in parameters(stock).items():
        assert ours[name] is array
    back = ours.to_stock()
    assert type(back) is nn.QuantizedEmbedding
    assert_same_arrays(parameters(back), parameters(stock))
    assert vars(back) == vars(stock)
    assert repr(back) == repr(stock)
