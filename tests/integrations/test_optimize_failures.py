"""If `optimize` or `restore` fails at any stage, the model is unchanged."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import activations, base, llama, rope_utils, switch_layers
from mlx_lm.models import cache as caches

import mlx_marlin
from mlx_marlin.layers.experts import MarlinSwitchLinear
from mlx_marlin.layers.guarded_parameters import GuardedParameters
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm import layer_conversion, tracing
from mlx_marlin.lm.module_tree import Changes
from mlx_marlin.lm.tracing import block
from mlx_marlin.lm.tracing.block import TracedBlock
from mlx_marlin.lm.tracing.model_families import FAMILIES
from support.decoder_models import one_stream, tiny
from support.models import Layers, arrays, tiny_llama, types
from support.profiles import sampled

pytestmark = pytest.mark.usefixtures("stock", "unfused")


class PlantedError(Exception):
    """The error of a stage."""


def fails_at(nth: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a wrapper of a function that raises in its n-th call only."""
    count = 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == nth:
            raise PlantedError
        return function(*arguments, **options)

    return failing


def plant(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, nth: int) -> None:
    found = inspect.getattr_static(holder, name)
    if isinstance(found, classmethod):
        failing: Any = classmethod(fails_at(nth, found.__func__))
    else:
        failing = fails_at(nth, found)
    monkeypatch.setattr(holder, name, failing)


def dense() -> nn.Module:
    return tiny("llama")


def experts() -> nn.Module:
    return tiny("qwen3_moe")


STAGES: list[tuple[Callable[[], nn.Module], Any, str, int]] = [
    (dense, MarlinLinear, "from_quantized", 1),
    (dense, MarlinLinear, "from_quantized", 9),
    (dense, GuardedParameters, "keep_packed", 4),
    (experts, MarlinSwitchLinear, "from_quantized", 5),
    (dense, layer_conversion, "join", 1),
    (dense, layer_conversion, "join", 3),
    (dense, block, "trace_blocks", 1),
    (dense, Changes, "set_class", 2),
]
"""A model, the function that raises, and in which call."""

STATES: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "apart": {"layout": "mlx", "join": False, "trace": False},
    "joined": {"layout": "mlx", "join": True, "trace": False},
    "traced": {"layout": "mlx", "join": True, "trace": True},
}
"""How a model was optimized before."""


def model_in(state: str, make: Callable[[], nn.Module]) -> nn.Module:
    options = STATES[state]
    return make() if options is None else mlx_marlin.optimize(make(), **options)


def cases() -> list[Any]:
    found = []
    for state in STATES:
        for make, holder, name, nth in STAGES:
            if (state, name) != ("traced", "set_class"):  # no class changes then
                label = f"{state}-{make.__name__}-{name}-{nth}"
                found.append(pytest.param(state, make, holder, name, nth, id=label))
    return found


class Snapshot:
    """A model's modules, their classes and parameters, and its results."""

    def __init__(self, model: nn.Module, held: bool) -> None:
        self.types, self.arrays = types(model), arrays(model)
        self.modules = dict(model.named_modules()) if held else {}
        self.logits = first_logits(model)

    def assert_same(self, model: nn.Module) -> None:
        assert [*types(model).items()] == [*self.types.items()]
        now = arrays(model)
        assert [*now] == [*self.arrays]
        for path, array in self.arrays.items():
            assert now[path].dtype == array.dtype
            assert mx.array_equal(now[path], array)
        found = dict(model.named_modules())
        assert all(found[path] is each for path, each in self.modules.items())
        assert mx.array_equal(first_logits(model), self.logits)


def first_logits(model: nn.Module) -> mx.array:
    logits: mx.array = model(mx.array([[3]]), cache=one_stream(model))
    mx.eval(logits)
    return logits


@sampled(16)
@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
@pytest.mark.parametrize(("state", "make", "holder", "name", "nth"), cases())
def test_optimize_is_all_or_nothing(
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    make: Callable[[], nn.Module],
    holder: Any,
    name: str,
    nth: int,
    held: bool,
) -> None:
    model = model_in(state, make)
    before = Snapshot(model, held)
    plant(monkeypatch, holder, name, nth)

    with pytest.raises(PlantedError):
        mlx_marlin.optimize(model, layout="marlin", join=True, trace=True)

    before.assert_same(model)


@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
@pytest.mark.parametrize(
    ("options", "holder", "name", "nth"),
    [
        (STATES["traced"], Changes, "set_class", 2),
        (STATES["traced"], layer_conversion, "separate", 3),
        (STATES["traced"], MarlinLinear, "to_stock", 5),
        ({"layout": "marlin"}, MarlinLinear, "to_stock", 3),
    ],
    ids=str,
)
def test_restore_is_all_or_nothing(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    holder: Any,
    name: str,
    nth: int,
    held: bool,
) -> None:
    model = mlx_marlin.optimize(dense(), **options)
    before = Snapshot(model, held)
    plant(monkeypatch, holder, name, nth)

    with pytest.raises(PlantedError):
        mlx_marlin.restore(model)

    before.assert_same(model)


def test_a_failure_while_quantizing_keeps_the_float_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_llama(quantized=False)
    before = Snapshot(model, held=True)
    plant(monkeypatch, MarlinLinear, "_take", 9)

    with pytest.raises(PlantedError):
        mlx_marlin.optimize(model, quantize=True, group_size=32, layout="marlin")

    before.assert_same(model)


def test_a_refused_model_stays_joined() -> None:
    model = mlx_marlin.optimize(Layers(two_layers()), join=True)
    model.layers.append(nn.QuantizedLinear(80, 64, mode="nvfp4"))
    before = dict(model.named_modules())

    with pytest.raises(ValueError, match="invariant=True: 1 quantized"):
        mlx_marlin.optimize(model, invariant=True)

    assert all(each is before[path] for path, each in model.named_modules())


def two_layers() -> nn.Module:
    layers = nn.Module()
    for name in ("gate_proj", "up_proj"):
        layers[name] = nn.QuantizedLinear(64, 64)
    return layers


def test_a_model_of_joined_layers_alone_is_optimized_again() -> None:
    model = mlx_marlin.optimize(Layers(two_layers()), join=True)

    mlx_marlin.optimize(model, layout="marlin", join=False)

    assert [type(each) for each in model.layers[0].values()] == [MarlinLinear] * 2


def test_a_part_whose_other_part_is_gone_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mlx_marlin.optimize(Layers(two_layers()), join=True)
    part = model.layers[0].up_proj
    del model.layers[0]["gate_proj"]
    identity = id(part)
    del part
    plant(monkeypatch, MarlinLinear, "from_quantized", 1)

    with pytest.raises(PlantedError):
        mlx_marlin.optimize(model, layout="marlin")

    assert id(model.layers[0].up_proj) == identity


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], None]:
    """Returns a function that removes a name of mlx-lm and unloads the tracing code."""

    def remove(holder: Any, name: str) -> None:
        monkeypatch.delattr(holder, name)
        for module in TRACING_CODE:
            path = f"{tracing.__name__}.{module}"
            monkeypatch.delitem(sys.modules, path)
            monkeypatch.delattr(tracing, module)

    return remove


TRACING_CODE = ("attention", "block", "kv_cache", "inspection", "experts", "fusion")


@sampled(2)
@pytest.mark.parametrize("make", [dense, experts])
@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (rope_utils, "ProportionalRoPE"),
        (activations, "swiglu"),
        (activations, "SwigluOAI"),
        (caches, "BatchKVCache"),
        (base, "scaled_dot_product_attention"),
        (switch_layers, "SwitchGLU"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_class_that_mlx_lm_renamed_is_not_needed(
    without: Callable[[Any, str], None],
    make: Callable[[], nn.Module],
    holder: Any,
    name: str,
) -> None:
    model, other = make(), make()
    stock = types(model)
    without(holder, name)

    mlx_marlin.optimize(model, layout="marlin", join=True, trace=False)
    with pytest.warns(RuntimeWarning, match=f"not traced.*{name}.*mlx-lm 0.*tested"):
        mlx_marlin.optimize(other, layout="marlin", join=True, trace=True)
    mlx_marlin.optimize(model, trace=True)  # a second warning would be an error

    for each in (model, other):
        assert {MarlinLinear} <= {*types(each).values()}
        assert "TracedTransformerBlock" not in [
            cls.__name__ for cls in types(each).values()
        ]
        mlx_marlin.restore(each)
        assert types(each) == stock


def test_a_cache_that_mlx_lm_changed_leaves_blocks_untraced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Changed(caches.BatchKVCache):
        def __init__(self, padding: list[int]) -> None:
            super().__init__(padding)
            del self._idx

    monkeypatch.setattr("mlx_marlin.lm.tracing.kv_cache.BatchKVCache", Changed)
    model = dense()

    with pytest.warns(RuntimeWarning, match=r"not traced.*_idx"):
        mlx_marlin.optimize(model, trace=True)

    assert not any(isinstance(each, TracedBlock) for each in model.layers)


def test_a_block_that_mlx_lm_renamed_is_not_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = dense()
    monkeypatch.delattr(llama, "TransformerBlock")

    with pytest.warns(RuntimeWarning, match=r"blocks of llama are not traced"):
        mlx_marlin.optimize(model, trace=True)

    assert not any(isinstance(each, TracedBlock) for each in model.layers)


@pytest.mark.parametrize("name", ["Attention", "MLP"])
def test_parts_of_a_block_that_mlx_lm_renamed_are_its_own(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, own = dense(), dense()
    expected = first_logits(own)
    mlx_marlin.optimize(model, trace=True)
    monkeypatch.delattr(llama, name)

    with pytest.warns(
        RuntimeWarning, match=rf"blocks of .*llama.* no attribute '{name}'"
    ):
        logits = first_logits(model)

    assert mx.array_equal(logits, expected)


@pytest.mark.parametrize("name", ["layers", "router"])
def test_a_layer_of_experts_that_mlx_lm_renamed_leaves_its_own_code(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected = first_logits(tiny("qwen3_moe"))
    family = FAMILIES["qwen3_moe"]
    experts = replace(family.experts, **{name: "renamed"})
    monkeypatch.setitem(FAMILIES, "qwen3_moe", replace(family, experts=experts))

    with pytest.warns(RuntimeWarning, match="blocks of .*qwen3_moe.* no layer 'ren"):
        model = mlx_marlin.optimize(tiny("qwen3_moe"), trace=True)

    assert mx.array_equal(first_logits(model), expected)


def test_tracing_code_is_not_imported_unless_asked_for() -> None:
    script = """
import sys
import mlx.nn as nn
from mlx_lm.models import llama
import mlx_marlin
model = llama.Model(llama.ModelArgs("llama", 64, 1, 64, 2, 1e-5, 100))
nn.quantize(model)
mlx_marlin.optimize(model, trace=False)
mlx_marlin.restore(model)
tracing = [each for each in sys.modules if each.startswith("mlx_marlin.lm.tracing.")]
assert not tracing, tracing
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ)
