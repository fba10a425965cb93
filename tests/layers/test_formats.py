"""Layers of every scheme and width answer and learn as MLX's own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

import mlx_marlin
from mlx_marlin import state
from mlx_marlin.backends import graph
from mlx_marlin.layers.embedding import MarlinEmbedding
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.products.packing import quantize
from support.format_calls import (
    FEW,
    LAYOUTS,
    K,
    Loss,
    N,
    W,
    X,
    assert_close,
    few,
    floating,
    layouts,
    loss,
    native,
    of_mlx,
    options_of,
    quantized_layer,
)
from support.format_cases import MLX_MODES
from support.models import Layers, arrays, assert_same_model
from support.profiles import sampled

pytestmark = pytest.mark.usefixtures("kernels", "_the_same_numbers")


@pytest.fixture
def _the_same_numbers() -> None:
    mx.random.seed(0)  # layers draw their weights


def assert_same_arrays(actual: nn.Module, expected: nn.Module) -> None:
    found, known = arrays(actual), arrays(expected)
    assert found.keys() == known.keys()
    assert all(found[name].dtype == known[name].dtype for name in known)
    assert all(mx.array_equal(found[name], known[name]) for name in known)


@sampled(3)
@of_mlx
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_answers_as_mlxs_and_turns_back(
    mode: str, bits: int, group_size: int, bias: bool
) -> None:
    stock = quantized_layer(options_of(mode, bits, group_size), bias)
    for layout in LAYOUTS:
        ours = MarlinLinear.from_quantized(stock, layout=layout)

        assert_close(ours(X), stock(X))
        assert (ours.mode, ours.bits, ours.group_size) == (mode, bits, group_size)
        assert ours.trainable_parameters() == {} or "bias" in ours
        back = ours.to_stock()
        assert mx.array_equal(back(X), stock(X))
        assert_same_model(Layers(back), Layers(stock))
        assert repr(back) == repr(stock)


@sampled(2, 5)
@few
def test_a_layer_is_made_from_floats_and_from_nothing(
    mode: str, bits: int, group_size: int
) -> None:
    options = options_of(mode, bits, group_size)
    linear = nn.Linear(K, N)
    linear.set_dtype(mx.float16)
    stock = nn.QuantizedLinear.from_linear(linear, **options)

    for layout in LAYOUTS:
        ours = MarlinLinear.from_linear(linear, **options, layout=layout)
        empty = MarlinLinear(K, N, True, group_size, bits, mode, layout=layout)

        assert_close(ours(X), stock(X))
        assert_same_arrays(ours.to_stock(), stock)
        assert (empty.input_dims, empty.output_dims, empty.bias.shape) == (K, N, (N,))
        assert empty.trainable_parameters() == {}
        assert empty(X.astype(mx.float32)).shape == (2, 3, N)
        assert (ours.biases is None) == (mode != "affine")
        assert f"mode={mode}" in repr(ours)


@pytest.mark.parametrize("mode", MLX_MODES)
@layouts
def test_a_layers_defaults_are_its_modes(mode: str, layout: str) -> None:
    linear = nn.Linear(K, N)
    stock = nn.QuantizedLinear.from_linear(linear, mode=mode)

    for ours in (
        MarlinLinear(K, N, False, mode=mode, layout=layout),
        MarlinLinear.from_linear(linear, mode=mode, layout=layout),
    ):
        assert (ours.bits, ours.group_size) == (stock.bits, stock.group_size)
    assert mx.array_equal(ours.weight, stock.weight)
    assert "bias" not in MarlinLinear(K, N, False, mode=mode, layout=layout)


@sampled(2)
@few
def test_a_saved_layer_is_loaded_by_its_like_and_by_mlxs(
    tmp_path: Any, mode: str, bits: int, group_size: int
) -> None:
    stock = quantized_layer(options_of(mode, bits, group_size))
    ours = MarlinLinear.from_quantized(stock)
    path = str(tmp_path / "layer.safetensors")
    ours.save_weights(path)
    form = (K, N, True, group_size, bits, mode)

    for again in (MarlinLinear(*form), nn.QuantizedLinear(*form)):
        again.load_weights(path)
        assert_same_arrays(again, stock)


@sampled(2)
@of_mlx
def test_the_gradient_of_x_is_mlxs(mode: str, bits: int, group_size: int) -> None:
    options = options_of(mode, bits, group_size)
    arrays = native(options)
    expected = mx.grad(loss(mx.quantized_matmul, *arrays, **options))(X)

    ours = mx.grad(loss(mlx_marlin.quantized_matmul, *arrays, **options))(X)
    packed = mlx_marlin.pack(*arrays, **options)
    of_packed = mx.grad(loss(mlx_marlin.quantized_matmul, packed))(X)

    assert_close(ours, expected, rtol=5e-3)
    assert_close(of_packed, expected, rtol=5e-3)


@floating
def test_a_gradient_of_scales_that_are_bytes_raises(
    mode: str, bits: int, group_size: int
) -> None:
    options = options_of(mode, bits, group_size)
    w, scales = native(options)

    def of(product: Callable[..., mx.array]) -> Loss:
        return lambda s: product(X, w, s, **options).astype(mx.float32).sum()

    with pytest.raises(ValueError, match="no gradient wrt scales"):
        mx.eval(mx.grad(of(mx.quantized_matmul))(scales))
    with pytest.raises(ValueError, match="no gradient wrt uint"):
        mx.grad(of(mlx_marlin.quantized_matmul))(scales)

    packed = mlx_marlin.pack(w, scales, **options)

    def of_packed(s: mx.array) -> mx.array:
        weight = replace(packed, scales=s)
        return mlx_marlin.quantized_matmul(X, weight).astype(mx.float32).sum()

    with pytest.raises(ValueError, match="no gradient wrt uint"):
        mx.grad(of_packed)(packed.scales)


@sampled(2)
@floating
@layouts
def test_a_step_of_lora_is_stocks(
    mode: str, bits: int, group_size: int, layout: str
) -> None:
    from mlx.optimizers import SGD
    from mlx_lm.tuner.lora import LoRALinear

    stock = quantized_layer(options_of(mode, bits, group_size))
    ours = MarlinLinear.from_quantized(stock, layout=layout)
    target = mx.random.normal((2, 3, N), key=mx.random.key(6))

    def stepped(layer: nn.QuantizedLinear) -> tuple[mx.array, dict[str, mx.array]]:
        mx.random.seed(7)
        lora = LoRALinear.from_base(layer, r=4, scale=2.0)
        lora.lora_b = mx.random.normal(lora.lora_b.shape) / 8
        layer.freeze()

        def error(x: mx.array) -> mx.array:
            return ((lora(x).astype(mx.float32) - target) ** 2).mean()

        value, found = nn.value_and_grad(lora, error)(X)
        assert sorted(dict(tree_flatten(found))) == ["lora_a", "lora_b"]
        SGD(learning_rate=0.1).update(lora, found)
        return value, {"lora_a": lora.lora_a, "lora_b": lora.lora_b}

    value, found = stepped(ours)

    expected, weights = stepped(stock)
    assert_close(value, expected, rtol=1e-3)
    for name, array in weights.items():
        assert_close(found[name], array, rtol=1e-3)


@sampled(2)
@few
def test_an_embedding_is_looked_up_by_mlx_and_multiplied_by_us(
    mode: str, bits: int, group_size: int
) -> None:
    floats = nn.Embedding(N, K)
    floats.weight = W
    stock = floats.to_quantized(**options_of(mode, bits, group_size))
    state.reset()

    ours = MarlinEmbedding.from_quantized(stock)

    tokens = mx.array([[0, 5], [N - 1, 5]])
    assert mx.array_equal(ours(tokens), stock(tokens))
    assert graph.plans_built() == []
    x = X.astype(stock(tokens).dtype)
    assert_close(ours.as_linear(x), stock.as_linear(x), rtol=1e-2)
    assert [plan.problem.n for plan in graph.plans_built()] == [N]
    assert isinstance(ours, nn.QuantizedEmbedding)
    assert all(ours[name] is array for name, array in arrays(stock).items())
    assert_same_model(Layers(ours.to_stock()), Layers(stock))
    assert repr(ours.to_stock()) == repr(stock)


MIXED = [("affine", 4, 64), *FEW]


def mixed_model() -> Layers:
    """Makes a model with a layer of every kind."""
    layers = []
    for i, (mode, bits, group_size) in enumerate(MIXED):
        linear = nn.Linear(K, K)
        linear.weight = mx.random.normal((K, K), key=mx.random.key(i)) / 12
        linear.bias = mx.full((K,), 0.1)
        options = options_of(mode, bits, group_size)
        layers.append(nn.QuantizedLinear.from_linear(linear, **options))
    return Layers(*layers)


@sampled(1)
@layouts
def test_a_model_of_many_formats_is_converted_and_restored(layout: str) -> None:
    x = X.astype(mx.float32)
    stock = mixed_model()

    ours = mlx_marlin.optimize(mixed_model(), layout=layout)

    found = [(type(e), e.mode, e.bits, e.group_size, e.layout) for e in ours.layers]
    assert found == [(MarlinLinear, *each, layout) for each in MIXED]
    assert_close(ours(x), stock(x), rtol=1e-3)
    assert_same_model(mlx_marlin.restore(ours), stock)


@layouts
def test_a_model_with_a_layer_that_stock_serves_is_converted(layout: str) -> None:
    linear = nn.Linear(80, K)  # 80 fills no step of nvfp4
    first = nn.QuantizedLinear.from_linear(linear, 16, 4, "nvfp4")
    model = Layers(first, mixed_model().layers[2])
    x = mx.random.normal((3, 80), key=mx.random.key(8))
    expected = model(x)

    mlx_marlin.optimize(model, layout=layout)

    assert type(model.layers[1]) is MarlinLinear
    assert_close(model(x), expected, rtol=1e-3)


@sampled(2)
@layouts
@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_layers_are_quantized_to_any_width(bits: int, layout: str) -> None:
    linear = nn.Linear(K, N)

    model = mlx_marlin.optimize(
        Layers(linear), quantize=True, bits=bits, group_size=32, layout=layout
    )

    stock = nn.QuantizedLinear.from_linear(linear, 32, bits)
    x = X.astype(mx.float32)
    assert_close(model(x), stock(x), rtol=1e-3)


@sampled(1)
@pytest.mark.parametrize("group_size", [16, 256, "channel"])
def test_a_layer_may_have_a_group_size_of_ours(group_size: int | str) -> None:
    k = 320 if group_size == "channel" else 256
    linear = nn.Linear(k, N)
    x = mx.random.normal((3, k), key=mx.random.key(4))
    weight = quantize(linear.weight, group_size=group_size)
    expected = mlx_marlin.quantized_matmul(x, weight) + linear.bias

    ours = MarlinLinear.from_linear(linear, group_size, layout="marlin")
    empty = MarlinLinear(k, N, True, group_size, layout="marlin")
    again = MarlinLinear.from_quantized(ours, layout="marlin", invariant=True)

    for layer in (ours, again, back := ours.to_stock()):
        assert_close(layer(x), expected, rtol=1e-5)
    assert type(back) is (nn.Linear if group_size == 16 else nn.QuantizedLinear)
    assert empty(x).shape == (3, N)
    assert empty.trainable_parameters() == {}
    assert (ours.group_size, ours.bits) == (weight.group_size, 4)
    assert f"input_dims={k}, output_dims={N}" in repr(ours)
    assert f"group_size={weight.group_size}" in repr(empty)
    with pytest.raises(ValueError, match=f"group_size={weight.group_size}"):
        MarlinLinear.from_quantized(ours, layout="mlx")


@pytest.mark.parametrize("group_size", [16, 256, "channel"])
def test_a_model_may_have_group_sizes_of_ours(group_size: int | str) -> None:
    model = Layers(nn.Linear(512, 96), nn.Linear(96, 512))  # 96 fills none of them
    x = mx.random.normal((3, 512), key=mx.random.key(5))

    mlx_marlin.optimize(model, quantize=True, layout="marlin", group_size=group_size)

    first, second = model.layers
    assert type(first) is MarlinLinear
    assert type(second) is nn.Linear
    expected = model(x)
    mlx_marlin.restore(model)
    assert type(model.layers[0]) in (nn.Linear, nn.QuantizedLinear)
    assert_close(model(x), expected, rtol=1e-5)
    with pytest.raises(ValueError, match=rf"group_size={group_size!r} is not one of"):
        mlx_marlin.optimize(model, quantize=True, group_size=group_size)
