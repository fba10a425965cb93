"""Layers that share x are joined; layers are made from packed weights."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_marlin
from mlx_marlin import state
from mlx_marlin.backends import graph
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.joined import Joined, MarlinPart, can_join, join, separate
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.layers.reordered import ReorderedLinear
from mlx_marlin.lm import optimize as integration
from mlx_marlin.weights.packed_weight import PackedWeight
from support import format_cases, oracles
from support.arguments import activations
from support.format_calls import NOT_IN_MLX
from support.models import LAYOUTS, TOKENS, arrays, assert_same_model, tiny_llama
from support.packed_codes import packed_weights
from support.profiles import sampled
from support.strategies import Grouped

NAMES = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


def layers(*sizes: int, bias: bool = False, **options: Any) -> list[MarlinLinear]:
    mx.random.seed(3)
    return [MarlinLinear(128, size, bias, **options) for size in sizes]


@sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("kernels")
def test_a_model_has_the_same_answer_with_fewer_products(layout: str) -> None:
    model = tiny_llama()
    expected = mlx_marlin.optimize(model, layout=layout)(TOKENS)
    state.reset()

    joined = mlx_marlin.optimize(model, layout=layout, join=True)
    y = joined(TOKENS)

    assert joined is model
    assert mx.allclose(y, expected, atol=1e-5)
    shapes = {(plan.problem.k, plan.problem.n) for plan in graph.plans_built()}
    # Of seven products of a block four are left: q k v, o, gate up, down; and the head.
    assert shapes == {(64, 128), (64, 64), (64, 320), (160, 64), (64, 100)}
    parts = [path for path, m in model.named_modules() if isinstance(m, MarlinPart)]
    assert {path.split(".")[-1] for path in parts} == NAMES


@pytest.mark.parametrize("layout", LAYOUTS)
def test_joined_arrays_exist_once_and_come_back(layout: str) -> None:
    model = mlx_marlin.optimize(tiny_llama(), layout=layout)
    before = sum(array.nbytes for array in arrays(model).values())
    mlx_marlin.optimize(model, layout=layout, join=True)
    assert sum(array.nbytes for array in arrays(model).values()) == before

    mlx_marlin.optimize(model, layout=layout)

    assert not any(isinstance(each, MarlinPart) for each in model.modules())
    assert_same_model(mlx_marlin.restore(model), tiny_llama())
    mlx_marlin.optimize(model, layout=layout, join=True)
    assert_same_model(mlx_marlin.restore(model), tiny_llama())


def test_a_refused_call_leaves_a_joined_model_alone() -> None:
    model = mlx_marlin.optimize(tiny_llama(), join=True)
    before = [*model.modules()]

    with pytest.raises(ValueError, match="layout="):
        mlx_marlin.optimize(model, layout="nonsense")

    assert all(a is b for a, b in zip(model.modules(), before, strict=True))


def test_a_failure_while_joining_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_llama()
    calls: list[int] = []

    def failing(layers: list[MarlinLinear]) -> list[MarlinPart]:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError
        return join(layers)

    monkeypatch.setattr("mlx_marlin.lm.layer_conversion.join", failing)

    with pytest.raises(MemoryError):
        integration.optimize(model, join=True)

    assert_same_model(model, tiny_llama())


def test_a_layer_in_two_places_stays_alone() -> None:
    model = tiny_llama()
    first, second = (block.mlp for block in model.model.layers)
    second["up_proj"] = first["up_proj"]

    mlx_marlin.optimize(model, join=True)

    assert type(first["gate_proj"]) is MarlinLinear
    assert type(second["up_proj"]) is MarlinLinear
    assert type(model.model.layers[0].self_attn["q_proj"]) is MarlinPart


@pytest.mark.usefixtures("kernels")
def test_a_gradient_flows_through_every_part() -> None:
    alone = layers(40, 24, 8)
    together = join(alone)
    x = activations(3, 128)

    def loss(modules: list[nn.Module]) -> Callable[[mx.array], mx.array]:
        return lambda x: sum(
            (i + 1) * each(x).square().sum() for i, each in enumerate(modules)
        )

    found, expected = mx.grad(loss(together))(x), mx.grad(loss(alone))(x)
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.usefixtures("kernels")
def test_biases_are_added_as_in_a_layer_alone(dtype: mx.Dtype) -> None:
    alone = layers(40, 24, bias=True)
    for each in alone:
        each["bias"] = mx.random.normal(each["bias"].shape).astype(mx.float32)
        each["scales"] = each["scales"].astype(mx.float16)
        each["biases"] = each["biases"].astype(mx.float16)
    x = activations(3, 128, dtype=dtype)

    for ours, layer in zip(join(alone), alone, strict=True):
        y, expected = ours(x), layer(x)
        assert y.dtype == expected.dtype
        assert mx.allclose(y, expected, atol=2e-3)


def test_the_product_is_computed_once_and_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined = join(layers(40, 24))[0].shared
    calls: list[mx.array] = []
    product = joined.layer.parts

    def counted(x: mx.array, sizes: tuple[int, ...]) -> tuple[mx.array, ...]:
        calls.append(x)
        return product(x, sizes)

    monkeypatch.setattr(type(joined.layer), "parts", lambda _, *given: counted(*given))
    x, other = activations(2, 128), activations(2, 128)

    joined.part(x, 0), joined.part(x, 1)
    assert len(calls) == 1
    assert joined._kept == (None, [], {})
    joined.part(x, 1), joined.part(x, 0)
    assert len(calls) == 2
    # Somebody else's x, the same part again: nothing old is taken for new.
    joined.part(x, 0), joined.part(other, 1), joined.part(other, 1)
    assert len(calls) == 5


@sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", ["scales", "bias", "new bias"])
@pytest.mark.usefixtures("kernels")
def test_a_parameter_that_changes_between_two_parts_is_seen(
    change: str, layout: str
) -> None:
    alone = layers(40, 24, bias=change == "bias", layout=layout)
    first, second = join(alone)
    x, layer = activations(2, 128), first["joined"]
    name = "bias"
    if change == "scales":
        name = "scales" if layout == "mlx" else "packed_scales"

    before = first(x)
    new = 2 * layer[name] if change == "scales" else mx.arange(64.0)
    layer[name] = new
    after = second(x)

    assert mx.array_equal(before, alone[0](x))
    assert not mx.allclose(after, alone[1](x), atol=0.1)
    assert mx.allclose(after, separate(first.shared)[1](x), atol=1e-5)


@pytest.mark.parametrize(
    "others",
    [
        lambda: layers(40, group_size=32),
        lambda: layers(40, bits=8),
        lambda: layers(40, mode="mxfp4"),
        lambda: layers(40, bias=True),
        lambda: layers(40, layout="marlin"),
        lambda: layers(40, invariant=True),
        lambda: [MarlinLinear(64, 40, False)],
        lambda: [each for each in layers(40) if each.set_dtype(mx.float16) is each],
        lambda: layers(*[8] * 6),  # seven of them
        lambda: [nn.Linear(128, 40)],
        lambda: [nn.QuantizedLinear(128, 40)],
        list,
    ],
)
def test_layers_of_other_kinds_are_not_joined(others: Callable[[], list[Any]]) -> None:
    mixed = [*layers(40), *others()]

    assert not can_join(mixed)
    with pytest.raises(ValueError, match="layers must be 2 to 6 MarlinLinear"):
        join(mixed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_joined_comes_apart_exactly(layout: str) -> None:
    alone = layers(40, 24, bias=True, layout=layout)

    back = separate(join(alone)[1].shared)

    for ours, layer in zip(back, alone, strict=True):
        assert dict(ours).keys() == dict(layer).keys()
        assert all(mx.array_equal(ours[name], layer[name]) for name in dict(layer))
        assert ours._no_grad == layer._no_grad
    assert isinstance(join(alone)[0].shared, Joined)


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
