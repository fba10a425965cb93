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

from cli.conftest import Run
from mlx_marlin.cli import demo, models
from mlx_marlin.cli.main import main
from mlx_marlin.layers.linear import MarlinLinear
from mlx_marlin.lm.race.model_products import single_products
from mlx_marlin.planning.problem import Problem
from mlx_marlin.weights.formats import LAYOUTS
from support.marks import needs_emulator
from support.profiles import sampled

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
    kept: Path, model: Path, tuned: list[Problem], printed: Run
) -> None:
    printed("tune --rows 1,8", model)

    weights = mx.load(str(MODEL / "model.safetensors")).items()
    expected = {w.shape for name, w in weights if "_proj" in name}
    assert {(each.n, each.k) for each in tuned} == expected
    assert {(each.mode, each.group_size) for each in tuned} == {MODES[model.name]}
    assert {each.layout for each in tuned} == {"marlin"}
    assert {each.m for each in tuned} == {1, 8}


@sampled(2)
def test_kernels_are_checked(
    kept: Path, model: Path, monkeypatch: pytest.MonkeyPatch, printed: Run
) -> None:
    one = models.problems(str(model), [1])[:1]  # each takes a second
    monkeypatch.setattr(models, "problems", lambda name, rows: one)
    said = printed(f"doctor --json --check --rows 1 --model {model}")
    verdicts = json.loads(said)["verdicts"]["kernels"]
    assert verdicts
    assert all(verdict["passed"] for verdict in verdicts)


@pytest.fixture
def few_tokens(unfused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the demo read few tokens of the held-out text."""
    fewer = partial(demo.held_out_tokens, windows=1, length=16)
    monkeypatch.setattr(demo, "held_out_tokens", fewer)


@sampled(1)
@pytest.mark.usefixtures("few_tokens")
def test_text_is_generated(model: Path, printed: Run) -> None:
    output = printed("demo --tokens 4 --batch 1 --model", model)
    assert "1 of 1 texts equal stock MLX's" in output
    assert "4 bits" not in output


@sampled(1)
@pytest.mark.usefixtures("few_tokens", "wrong_products")
def test_the_reference_of_the_demo_is_stock_mlx(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A product of ours that is wrong must not be compared with itself."""
    options = ["demo", "--model", str(model), "--tokens", "3", "--batch", "1"]
    assert main(options) == 1
    assert "is not within" in capsys.readouterr().err


def test_groups_that_stock_mlx_lacks_are_not_measured(
    kept: Path, tuned: list[Problem], printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Module()
    plain = nn.Linear(128, 64)
    net.a = MarlinLinear.from_linear(plain, 16, 4, layout="marlin")
    net.b = MarlinLinear.from_linear(plain, 64, 4, layout="marlin")
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: (net, None))

    said = printed("tune some/model --rows 1")

    assert [problem.group_size for problem in tuned] == [64]
    assert "not measured, group_size=16 is not one of" in said


def test_packed_layers_are_found_without_unpacking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = nn.Module()
    net.a = MarlinLinear(128, 64, layout="marlin")
    monkeypatch.setattr(MarlinLinear, "native", lambda _: pytest.fail("unpacked"))
    found, others = single_products(net, LAYOUTS)
    assert [problem.layout for problem in found] == ["mlx", "marlin"]
    assert others == 0
