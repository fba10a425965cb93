"""Commands take models in all formats that `mlx_marlin.load` reads."""

import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest

from mlx_marlin.backends import launcher
from mlx_marlin.cli import models
from mlx_marlin.cli.demo import command as demo
from mlx_marlin.cli.main import main
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm.race.model_products import single_products
from mlx_marlin.weights.formats import LAYOUTS
from support.marks import needs_emulator
from support.tune_commands import measured_problems

pytestmark = needs_emulator

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "tiny_llama" / "model"
WRITERS = {"model.gguf": "gguf_file", "gptq": "gptq"}


def written(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes the demo's model as the example does."""
    monkeypatch.syspath_prepend(EXAMPLES / "import_weights")
    monkeypatch.delitem(sys.modules, WRITERS[name], raising=False)
    write: Callable[[Path, Path], None] = importlib.import_module(WRITERS[name]).write
    write(MODEL, folder / name)
    return folder / name


@pytest.fixture(params=[*WRITERS, "ours"])
def model(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The demo's model as a GGUF file, with act-order by GPTQ, or converted."""
    if request.param != "ours":
        return written(tmp_path, request.param, monkeypatch)
    source = written(tmp_path, "gptq", monkeypatch)
    assert main(["convert", str(source), str(tmp_path / "ours")]) == 0
    return tmp_path / "ours"


MODES = {"model.gguf": ("symmetric", 32), "gptq": ("zero_point", 64)}
MODES["ours"] = MODES["gptq"]


def test_layers_are_measured(
    kept: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = measured_problems(monkeypatch)
    assert main(["tune", str(model), "--rows", "1,8"]) == 0
    products = {(problem.n, problem.k) for problem in seen}
    assert products == {
        (w.shape[0], w.shape[1])
        for name, w in plain_weights().items()
        if "_proj" in name
    }
    assert {(problem.mode, problem.group_size) for problem in seen} == {
        MODES[model.name]
    }
    assert {problem.layout for problem in seen} == {"marlin"}
    assert {problem.m for problem in seen} == {1, 8}


def plain_weights() -> dict:
    return dict(mx.load(str(MODEL / "model.safetensors")))


def test_kernels_are_checked(
    kept: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = models.problems(str(model), [1])
    one = found[:1]  # each takes a second
    monkeypatch.setattr(models, "problems", lambda name, rows: one)
    options = ["doctor", "--json", "--check", "--model", str(model), "--rows", "1"]
    assert main(options) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]["kernels"]
    assert verdicts
    assert all(verdict["passed"] for verdict in verdicts)


def test_text_is_generated(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = partial(demo.held_out_tokens, windows=1, length=16)
    monkeypatch.setattr(demo, "held_out_tokens", fewer)
    options = ["demo", "--model", str(model), "--tokens", "4", "--batch", "1"]
    assert main(options) == 0
    output = capsys.readouterr().out
    assert "1 of 1 texts equal stock MLX's" in output
    assert "4 bits" not in output


def test_the_reference_of_the_demo_is_stock_mlx(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A product of ours that is wrong must not be compared with itself."""
    product = launcher.product

    def wrong(plan: object) -> Callable:
        right = product(plan)
        return lambda *arrays: right(*arrays) * 1.5

    monkeypatch.setattr(launcher, "product", wrong)
    fewer = partial(demo.held_out_tokens, windows=1, length=16)
    monkeypatch.setattr(demo, "held_out_tokens", fewer)
    options = ["demo", "--model", str(model), "--tokens", "2", "--batch", "1"]
    assert main(options) == 1
    assert "is not within" in capsys.readouterr().err


def test_groups_that_stock_mlx_lacks_are_not_measured(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = measured_problems(monkeypatch)
    net = nn.Module()
    plain = nn.Linear(128, 64)
    net.a = MarlinLinear.from_linear(plain, 16, 4, layout="marlin")
    net.b = MarlinLinear.from_linear(plain, 64, 4, layout="marlin")
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: (net, None))
    assert main(["tune", "some/model", "--rows", "1"]) == 0
    assert [problem.group_size for problem in seen] == [64]
    said = capsys.readouterr().out
    assert "not measured, group_size=16 is not one of" in said
    assert main(["tune", "1x64x128", "--group-size", "16"]) == 2


def test_packed_layers_are_found_without_unpacking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = nn.Module()
    net.a = MarlinLinear(128, 64, layout="marlin")
    monkeypatch.setattr(MarlinLinear, "native", lambda _: pytest.fail("unpacked"))
    found, others = single_products(net, LAYOUTS)
    assert [problem.layout for problem in found] == ["mlx", "marlin"]
    assert others == 0
