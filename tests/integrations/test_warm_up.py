"""`optimize(warm_up=...)` builds and checks what a model needs before it is used."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import mlx_marlin
from mlx_marlin import emulator, guard
from mlx_marlin.backends import launch
from mlx_marlin.guard import known_answers, verdicts
from support.models import tiny_llama

pytestmark = pytest.mark.skipif(
    emulator.unavailable() is not None, reason="the emulator does not run here"
)


@pytest.fixture
def checked(
    backend: Callable[[str | None], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
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
    assert {plan.problem.m for plan in launch.plans_built()} == {1, 3}

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
    assert {plan.problem.m for plan in launch.plans_built()} == {2}
    known = len(checked)
    assert known > 0
    mx.eval(model(mx.zeros((2, 128))))
    assert len(checked) == known


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
