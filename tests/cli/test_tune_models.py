"""`mlx-marlin tune --model` measures the products of a model's layers."""

from pathlib import Path

import mlx.nn as nn
import mlx_lm
import pytest

from cli.conftest import Run
from mlx_marlin.planning.problem import Problem
from support.choose import Choose
from support.marks import needs_emulator
from support.models import tiny_llama
from support.tune_commands import on_h200

pytestmark = needs_emulator


def test_a_models_layers_are_measured(
    kept: Path, tuned: list[Problem], printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def load(name: str, *, lazy: bool) -> tuple[nn.Module, None]:
        asked.append((name, lazy))
        model = tiny_llama(tied=False)
        model.extra = nn.QuantizedLinear(64, 64, mode="mxfp4")
        model.odd = nn.QuantizedLinear(96, 64, mode="nvfp4")
        return model, None

    monkeypatch.setattr(mlx_lm, "load", load)

    said = printed("tune some/model --rows 1,8 --dtype float16")

    assert asked == [("some/model", True)]
    assert len(tuned) == 12
    assert {each.m for each in tuned} == {1, 8}
    assert {each.dtype for each in tuned} == {"float16"}
    assert {each.mode for each in tuned} == {"affine", "mxfp4"}
    assert {each.layout for each in tuned} == {"mlx"}
    assert "1 quantized layers are in formats that our kernels do not read" in said

    printed("tune some/model --rows 1 --layout both")
    assert len(tuned[12:]) == 12
    assert {each.layout for each in tuned[12:]} == {"mlx", "marlin"}


def test_on_cuda_a_models_layers_are_measured_packed_but_a_tied_head(
    kept: Path,
    backend: Choose,
    tuned: list[Problem],
    printed: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_h200(backend, monkeypatch)
    model = tiny_llama(tied=True)
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: (model, None))

    printed("tune a/model --rows 1 --dtype float16")

    head = model.model.embed_tokens.scales.shape[0]
    layouts = {each.n: each.layout for each in tuned}
    assert layouts.pop(head) == "mlx"
    assert {*layouts.values()} == {"marlin"}
