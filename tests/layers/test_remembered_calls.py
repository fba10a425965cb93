"""Layers remember which calls stock MLX serves, until what decides that changes."""

import copy
import pickle
import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_marlin import state
from mlx_marlin.backends import selection
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm.layer_conversion import join_layers
from mlx_marlin.lm.module_tree import Changes
from mlx_marlin.products import experts, linear, matmul
from support.choose import Choose

K, N, EXPERTS = 128, 64, 4
X = mx.random.normal((3, K), key=mx.random.key(1))
CHOSEN = mx.array([[0], [3], [1]], mx.uint32)


class Layer:
    """A layer of ours, stock's own, and how both are called."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        if kind == "experts":
            self.stock: Any = QuantizedSwitchLinear(K, N, EXPERTS, bias=True)
            self.ours: Any = MarlinSwitchLinear.from_quantized(self.stock)
        else:
            self.stock = nn.QuantizedLinear(K, N, bias=kind == "bias")
            self.ours = MarlinLinear.from_quantized(self.stock)
        if kind == "joined":
            model = nn.Module()
            model.gate_proj, model.up_proj = self.ours, copy.deepcopy(self.ours)
            join_layers(model, Changes())
            self.ours, self.other = model.gate_proj, model.up_proj

    def decides_in(self) -> Any:
        """Returns the layer that remembers."""
        return self.ours.shared.layer if self.kind == "joined" else self.ours

    def __call__(self, layer: Any, x: mx.array = X) -> mx.array:
        if self.kind == "experts":
            y: mx.array = layer(x[:, None, None], CHOSEN)
            return y
        if self.kind == "joined" and layer is self.ours:
            self.other(x)  # takes its part, so that the next call computes again
        result: mx.array = layer(x)
        return result

    def remember(self) -> None:
        """Calls ours until it remembers the call as its last one."""
        for _ in range(3):
            self(self.ours)


@pytest.fixture(params=["plain", "bias", "joined", "experts"])
def layer(request: pytest.FixtureRequest, backend: Choose) -> Layer:
    backend("stock")
    return Layer(request.param)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the times that a decision was asked for."""
    found: list[str] = []
    prepared, experts_native = matmul.prepared_call, experts.gather_native

    def listed(*given: Any) -> Any:
        found.append("product")
        return prepared(*given)

    def listed_experts(*given: Any, **more: Any) -> Any:
        found.append("experts")
        return experts_native(*given, **more)

    for module in (matmul, linear):
        monkeypatch.setattr(module, "prepared_call", listed)
    monkeypatch.setattr("mlx_marlin.layers.experts.gather_native", listed_experts)
    return found


def test_the_second_call_asks_nobody(layer: Layer, asked: list[str]) -> None:
    for _ in range(3):
        assert mx.array_equal(layer(layer.ours), layer(layer.stock))
        if asked:
            first = len(asked)
    assert first == len(asked)
    asked.clear()
    layer(layer.ours)
    assert asked == []


@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, mx.float32), (40, mx.float32), (40, mx.float16)]
)
def test_another_shape_or_dtype_is_another_call(
    rows: int, dtype: mx.Dtype, layer: Layer, asked: list[str]
) -> None:
    if layer.kind == "experts":
        return  # as many rows as choices
    for x in (X, mx.zeros((40, K), mx.bfloat16)):
        for _ in range(3):
            layer(layer.ours, x)
    asked.clear()
    layer(layer.ours, mx.zeros((rows, K), dtype))
    assert asked  # of many rows each dtype is another call, too


@pytest.mark.parametrize("rows", [8, 9])
def test_only_up_to_eight_rows_are_one_call_in_every_dtype(
    rows: int, layer: Layer, asked: list[str]
) -> None:
    if layer.kind in ("joined", "experts"):
        return  # which remember the dtype
    for _ in range(3):
        layer(layer.ours, mx.ones((rows, K)))
    asked.clear()
    layer(layer.ours, mx.ones((rows, K), mx.bfloat16))
    assert bool(asked) == (rows == 9)


def test_a_reset_expires_it(layer: Layer, asked: list[str]) -> None:
    layer.remember()
    asked.clear()
    state.reset()
    layer(layer.ours)
    assert asked


def test_a_call_on_the_cpu_is_not_remembered_where_a_gpu_might_serve(
    layer: Layer, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "may_hand_over", lambda: True)
    layer.remember()
    asked.clear()
    layer(layer.ours)
    assert asked


@pytest.mark.parametrize("change", ["item", "attribute", "update", "pop", "delete"])
def test_any_change_of_the_layer_expires_it(
    change: str, layer: Layer, asked: list[str]
) -> None:
    layer.remember()
    own = layer.decides_in()
    twice = own["scales"] * 2
    if change == "item":
        own["scales"] = twice
    elif change == "update":
        own.update({"scales": twice})
    elif change == "attribute":
        own.group_size = own.group_size
    elif change == "pop":
        own["scales"] = own.pop("scales") * 2
    else:
        del own["biases"]
        own["biases"] = layer.stock.biases
        if layer.kind == "joined":
            own["biases"] = mx.concatenate([layer.stock.biases] * 2)
    asked.clear()
    y = layer(layer.ours)
    assert asked
    if change in ("item", "update", "pop"):
        layer.stock.scales = layer.stock.scales * 2
    assert mx.allclose(y, layer(layer.stock), atol=1e-4)


def test_rows_that_must_not_vary_are_refused_afterwards(layer: Layer) -> None:
    layer.remember()
    layer.decides_in().invariant = True
    with pytest.raises(ValueError, match="invariant=True cannot be kept"):
        layer(layer.ours)


def test_copies_remember_for_themselves(layer: Layer) -> None:
    layer.remember()
    if layer.kind == "joined":
        return
    for copied in (copy.deepcopy(layer.ours), pickle.loads(pickle.dumps(layer.ours))):
        copied["scales"] = copied["scales"] * 0
        if "biases" in copied:
            copied["biases"] = copied["biases"] * 0
        if "bias" in copied:
            copied["bias"] = copied["bias"] * 0
        assert not layer(copied).any()
    assert layer(layer.ours).any()


def test_gradients_of_scales_follow_the_layer(layer: Layer) -> None:
    if layer.kind == "joined":
        return
    layer.remember()
    for each in (layer.ours, layer.stock):
        each.unfreeze(keys=["scales"], strict=False)

    def loss(own: Any) -> mx.array:
        return (layer(own) ** 2).sum()

    grads = [
        nn.value_and_grad(each, loss)(each)[1]["scales"]
        for each in (layer.ours, layer.stock)
    ]
    assert mx.allclose(*grads, rtol=1e-4)


def test_few_calls_are_remembered(layer: Layer) -> None:
    own = layer.decides_in()
    for nth in range(3 * 256):
        own.remember_stock((nth,), None)
    assert len(own._stock_calls) <= 256


def test_calls_that_take_turns_are_all_remembered(
    layer: Layer, asked: list[str]
) -> None:
    if layer.kind == "experts":
        return  # as many rows as choices
    rows = [mx.random.normal((n, K), key=mx.random.key(n)) for n in (1, 2)]
    for x in rows * 2:
        layer(layer.ours, x)
    asked.clear()
    for x in rows * 2:
        assert mx.array_equal(layer(layer.ours, x), layer(layer.stock, x))
    assert asked == []


def test_remembering_changes_no_attribute(layer: Layer) -> None:
    own = layer.decides_in()
    before = dict(vars(own))
    layer.remember()
    assert own._stock_calls
    assert vars(own) == before


def test_a_reset_keeps_no_layer() -> None:
    layer = MarlinLinear(K, N)
    layer.remember_stock(K)
    alive = weakref.ref(layer)
    del layer
    assert alive() is None
    state.reset()
