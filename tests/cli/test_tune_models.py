"""`mlx-marlin tune --model` measures the products of a model's layers."""

from pathlib import Path

import mlx.nn as nn
import mlx_lm
import pytest

from mlx_marlin.cli.main import main
from support.choose import Choose
from support.marks import needs_emulator
from support.models import Layers, tiny_llama
from support.tune_commands import measured_problems, on_h200

pytestmark = needs_emulator


def test_a_models_layers_are_measured(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = measured_problems(monkeypatch)
    asked: list[tuple[str, bool]] = []

    def load(name: str, *, lazy: bool) -> tuple[nn.Module, None]:
        asked.append((name, lazy))
        model = tiny_llama(tied=False)
        model.extra = nn.QuantizedLinear(64, 64, mode="mxfp4")
        model.odd = nn.QuantizedLinear(96, 64, mode="nvfp4")
        return model, None

    monkeypatch.setattr(mlx_lm, "load", load)

    assert main(["tune", "some/model", "--rows", "1,8", "--dtype", "float16"]) == 0

    assert asked == [("some/model", True)]
    assert len(seen) == 12
    assert {each.m for each in seen} == {1, 8}
    assert {each.dtype for each in seen} == {"float16"}
    assert {each.mode for each in seen} == {"affine", "mxfp4"}
    assert {each.layout for each in seen} == {"mlx"}
    assert (
        "1 quantized layers are in formats that our kernels do not read"
        in capsys.readouterr().out
    )

    main(["tune", "some/model", "--rows", "1", "--layout", "both"])
    assert len(seen[12:]) == 12
    assert {each.layout for each in seen[12:]} == {"mlx", "marlin"}


def test_on_cuda_a_models_layers_are_measured_packed_but_a_tied_head(
    kept: Path, backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_h200(backend, monkeypatch)
    seen = measured_problems(monkeypatch)
    model = tiny_llama(tied=True)
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: (model, None))

    assert main(["tune", "a/model", "--rows", "1", "--dtype", "float16"]) == 0

    head = model.model.embed_tokens.scales.shape[0]
    layouts = {each.n: each.layout for each in seen}
    assert layouts.pop(head) == "mlx"
    assert {*layouts.values()} == {"marlin"}


def test_a_model_that_is_none_is_said(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "4x64xy"]) == 2
    said = capsys.readouterr().err
    assert "'4x64xy' is neither a shape such as 8x4096x11008 nor a model" in said
    assert "no such folder or file" in said

    monkeypatch.setattr(
        mlx_lm, "load", lambda *_, **__: (Layers(nn.Linear(8, 8)), None)
    )
    assert main(["tune", "a/model"]) == 2
    assert "has no quantized linear layer in a format that" in capsys.readouterr().err
