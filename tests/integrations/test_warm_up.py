"""`optimize(warm_up=...)` compiles and checks all kernels of a model."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

import mlx_marlin
from mlx_marlin import guard
from mlx_marlin.backends import launcher
from mlx_marlin.guard import known_answers, verdicts
from support.choose import Choose
from support.marks import needs_emulator
from support.models import tiny_llama
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
    assert {plan.problem.m for plan in launcher.plans_built()} == {1, 3}

    for shape in ((1, 1), (3, 1), (1, 3)):
        tokens = mx.zeros(shape, mx.int32)
        mx.eval(model(tokens, cache=make_prompt_cache(model)))
    assert len(checked) == known
    mx.eval(model(mx.zeros((1, 5), mx.int32)))
    assert len(checked) > known


def test_other_modules_are_warmed_up_layer_by_layer(checked: list[Any]) -> None:
    modules = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 96))
    nn.quantize(modules)
    model = mlx_marlin.optimize(modules, layout="marlin", warm_up=[2])
    assert {plan.problem.m for plan in launcher.plans_built()} == {2}
    known = len(checked)
    assert known > 0
    mx.eval(model(mx.zeros((2, 128))))
    assert len(checked) == known


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


def assert_nothing_new(checked: list[Any], run: Callable[[], mx.array]) -> None:
    known = len(checked)
    assert known > 0
    mx.eval(run())
    assert len(checked) == known


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_joined_layers_are_warmed_up_together(checked: list[Any], layout: str) -> None:
    model = Attention()
    nn.quantize(model)
    mlx_marlin.optimize(model, layout=layout, join=True, warm_up=[2])
    assert [plan.problem.n for plan in checked] == [128]
    assert_nothing_new(checked, lambda: model(mx.zeros((2, 128))))


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_experts_are_warmed_up(checked: list[Any], layout: str) -> None:
    model = Single(SwitchLinear(128, 64, 4).to_quantized(group_size=64, bits=4))
    mlx_marlin.optimize(model, layout=layout, warm_up=[2])
    x, chosen = mx.zeros((2, 1, 1, 128)), mx.array([[1], [3]])
    assert_nothing_new(checked, lambda: model.layer(x, chosen))


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_heads_are_warmed_up(checked: list[Any], layout: str) -> None:
    model = Single(MultiLinear(128, 64, 4).to_quantized(group_size=64, bits=4))
    mlx_marlin.optimize(model, layout=layout, warm_up=[2])
    assert_nothing_new(checked, lambda: model.layer(mx.zeros((4, 2, 128))))
    back = partial(model.layer, transpose=False)
    assert_nothing_new(checked, lambda: back(mx.zeros((4, 2, 64))))


def test_embeddings_are_warmed_up_as_output_heads(checked: list[Any]) -> None:
    model = Single(nn.QuantizedEmbedding(96, 128))
    mlx_marlin.optimize(model, warm_up=[2])
    assert_nothing_new(checked, lambda: model.layer.as_linear(mx.zeros((2, 128))))


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
    assert_nothing_new(checked, lambda: model.layer(mx.zeros((2, 128), dtype)))


def test_without_any_floats_scales_that_are_bytes_meet_bfloat16(
    checked: list[Any],
) -> None:
    layer = nn.Linear(128, 64, bias=False).to_quantized(mode="mxfp4")
    mlx_marlin.optimize(nn.Sequential(layer), warm_up=[2])
    assert [plan.problem.dtype for plan in checked] == ["bfloat16"]


@pytest.mark.parametrize("rows", [(0,), (1, -1), (1.5,), ("1",), "12", (True,)])
def test_rows_that_are_none_are_refused_before_anything_changes(rows: Any) -> None:
    model = tiny_llama()
    before = copy.deepcopy(tree_flatten(model.parameters()))
    with pytest.raises(ValueError, match=r"warm_up=.*expected numbers of rows"):
        mlx_marlin.optimize(model, warm_up=rows)
    after = tree_flatten(model.parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert not any(
        isinstance(each, mlx_marlin.MarlinLinear) for each in model.modules()
    )


def test_a_warm_up_that_fails_leaves_the_model_as_it_was(
    checked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    kinds = [type(each) for each in model.modules()]

    def fails(_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(known_answers, "fault_of", fails)
    with pytest.raises(KeyboardInterrupt):
        mlx_marlin.optimize(model, warm_up=(1,))
    assert [type(each) for each in model.modules()] == kinds
