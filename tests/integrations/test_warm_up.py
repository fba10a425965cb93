"""`optimize(warm_up=...)` compiles and checks all kernels of a model."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

import mlx_marlin
from mlx_marlin import guard
from mlx_marlin.backends import graph, kernels
from mlx_marlin.guard import known_answers, verdicts
from mlx_marlin.lm import warm_up
from support.choose import Choose
from support.marks import needs_emulator
from support.models import LAYOUTS, assert_same_model, tiny_llama
from support.profiles import sampled

pytestmark = needs_emulator


@pytest.fixture
def checked(
    backend: Choose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[Any]:
    """Switches the guard on and lists the plans whose kernels are checked."""
    monkeypatch.setenv(guard.ENVIRONMENT, "1")
    monkeypatch.setattr(verdicts, "folder", lambda: tmp_path / "verdicts")
    plans: list[Any] = []
    monkeypatch.setattr(known_answers, "fault_of", plans.append)
    backend("emulator")
    return plans


def test_no_kernel_is_checked_after_the_warm_up(checked: list[Any]) -> None:
    model = mlx_marlin.optimize(tiny_llama(tied=False), warm_up=(1, 3))
    known = len(checked)
    assert known > 0
    assert {plan.problem.m for plan in graph.plans_built()} == {1, 3}

    for shape in ((1, 1), (3, 1), (1, 3)):
        tokens = mx.zeros(shape, mx.int32)
        mx.eval(model(tokens, cache=make_prompt_cache(model)))
    assert len(checked) == known
    mx.eval(model(mx.zeros((1, 5), mx.int32)))
    assert len(checked) > known


def test_an_error_of_one_compilation_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def compiled(number: int) -> None:
        if number == 5:
            raise RuntimeError("the compiler refused the sixth")
        done.append(number)

    tasks = {str(i): partial(compiled, i) for i in range(12)}
    monkeypatch.setattr(kernels, "deferred", lambda: nullcontext(tasks))

    with pytest.raises(RuntimeError, match="refused the sixth"):
        warm_up.compile_steps([])
    assert sorted(done) == [i for i in range(12) if i != 5]


class Attention(nn.Module):
    """Layers with the same input and mlx-lm's names, in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(128, 64)
        self.k_proj = nn.Linear(128, 32)
        self.v_proj = nn.Linear(128, 32)

    def __call__(self, x: mx.array) -> mx.array:
        parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return mx.concatenate(parts, -1)


class Single(nn.Module):
    """A module with one layer, and a norm whose weight determines the dtype."""

    def __init__(self, layer: nn.Module, dtype: mx.Dtype = mx.float32) -> None:
        super().__init__()
        self.a_norm = nn.RMSNorm(128)
        self.layer = layer
        self.set_dtype(dtype)


def sequence(model: nn.Module) -> mx.array:
    return model(mx.zeros((2, 128)))


def heads(model: Single) -> list[mx.array]:
    forth = model.layer(mx.zeros((4, 2, 128)))
    return [forth, model.layer(mx.zeros((4, 2, 64)), transpose=False)]


FORMAT = {"group_size": 64, "bits": 4}
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], list[int]]] = {
    "layer by layer": (
        lambda: nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 96)),
        sequence,
        [64, 96],
    ),
    "joined": (Attention, sequence, [128]),
    "experts": (
        lambda: Single(SwitchLinear(128, 64, 4)),
        lambda model: model.layer(mx.zeros((2, 1, 1, 128)), mx.array([[1], [3]])),
        [64],
    ),
    "heads": (lambda: Single(MultiLinear(128, 64, 4)), heads, [64]),
    "output heads": (
        lambda: Single(nn.Embedding(96, 128)),
        lambda model: model.layer.as_linear(mx.zeros((2, 128))),
        [96],
    ),
}
"""Modules, what calls their products with two rows, and the features of these."""


@sampled(6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODULES)
def test_modules_are_warmed_up(checked: list[Any], name: str, layout: str) -> None:
    make, run, features = MODULES[name]
    model = make()
    nn.quantize(model, **FORMAT)
    mlx_marlin.optimize(model, layout=layout, join=True, warm_up=[2])
    known = [plan.problem for plan in checked]
    assert {each.m for each in known} == {2}
    # A packed weight of heads has a plan for either direction.
    both = name == "heads" and layout == "marlin"
    assert [each.n for each in known] == features * (1 + both)
    mx.eval(run(model))
    assert len(checked) == len(known)


def test_equal_products_are_called_once() -> None:
    model = nn.Module()
    model.first, model.second = nn.QuantizedLinear(128, 64), nn.QuantizedLinear(128, 64)
    mlx_marlin.optimize(model)
    assert len([*warm_up.layer_steps(model, 2)]) == 1


def test_each_dtype_of_scales_is_warmed_up(checked: list[Any]) -> None:
    layers = [nn.QuantizedLinear(128, 64), nn.QuantizedLinear(128, 64)]
    layers[1].set_dtype(mx.float16)
    mlx_marlin.optimize(nn.Sequential(*layers), warm_up=[2])
    assert {plan.problem.dtype for plan in checked} == {"float32", "float16"}


@sampled(3)
@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32, mx.bfloat16])
def test_scales_that_are_bytes_meet_the_dtype_of_the_model(
    checked: list[Any], mode: str, dtype: mx.Dtype
) -> None:
    layer = nn.Linear(128, 64, bias=False).to_quantized(mode=mode)
    model = Single(layer, dtype)
    mlx_marlin.optimize(model, warm_up=[2])
    (plan,) = checked
    mx.eval(model.layer(mx.zeros((2, 128), dtype)))
    assert checked == [plan]


def test_without_any_floats_scales_that_are_bytes_meet_bfloat16(
    checked: list[Any],
) -> None:
    layer = nn.Linear(128, 64, bias=False).to_quantized(mode="mxfp4")
    mlx_marlin.optimize(nn.Sequential(layer), warm_up=[2])
    assert [plan.problem.dtype for plan in checked] == ["bfloat16"]


@pytest.mark.parametrize("rows", [(0,), (1, -1), (1.5,), ("1",), "12", (True,)])
def test_rows_that_are_none_are_refused_before_anything_changes(rows: Any) -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"warm_up=.*expected numbers of rows"):
        mlx_marlin.optimize(model, warm_up=rows)
    assert_same_model(model, tiny_llama())


def test_a_warm_up_that_fails_leaves_the_model_as_it_was(
    checked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()

    def fails(_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(known_answers, "fault_of", fails)
    with pytest.raises(KeyboardInterrupt):
        mlx_marlin.optimize(model, warm_up=(1,))
    assert_same_model(model, tiny_llama())
