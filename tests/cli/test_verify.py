"""`mlx-marlin verify` prints a line for equal layers, and fails if one is wrong."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cli.conftest import Run
from mlx_marlin import MarlinLinear
from mlx_marlin.cli.main import main
from mlx_marlin.lm.verification.report import (
    Errors,
    LayerReport,
    ProductReport,
    Report,
)
from mlx_marlin.tables import PIPED
from support.foreign_models import write
from support.recorder import Terminal

pytestmark = pytest.mark.usefixtures("kernels", "tokenizer")


class Tokenizer:
    """Tells characters apart, and nothing else."""

    eos_token_ids = (7,)

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 64 for character in text]


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_lm.utils.load_tokenizer", lambda *_, **__: Tokenizer())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write(tmp_path / "source", "gptq")
    return tmp_path / "source"


@pytest.fixture
def model(source: Path, tmp_path: Path, printed: Run) -> Path:
    """The source in MLX's layout, whose biases are rounded."""
    path = tmp_path / "model"
    printed("convert --layout mlx", source, path)
    return path


def test_a_conversion_passes(
    source: Path,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 3)

    options = ["--against", str(source), "--text", str(tmp_path / "text.txt")]
    command = ["verify", str(model), *options, "--rows", "1,4", "--seed", "7"]
    status = main([*command, "--json", str(tmp_path / "report.json")])

    out, _ = capsys.readouterr()
    assert status == 0, out
    (line,) = [each for each in out.splitlines() if "mlp.down_proj" in each]
    assert line.startswith("model.layers.*.mlp.down_proj  ")
    assert "count: 2" in out
    assert "Format: affine 4-bit, group 64" in out or "format: affine 4-bit" in out
    assert line.endswith("  ok")
    assert max(map(len, out.splitlines())) <= PIPED
    *_, perplexity, last = out.splitlines()
    assert perplexity.startswith("perplexity ")
    assert last.startswith("14 of 14 layers passed, 0 failed, 0 without a source (")
    assert last.endswith(", seed 7)")
    assert "verify: 100%" in terminal.getvalue()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] is True
    assert len(report["layers"]) == 14
    assert {p["rows"] for p in report["layers"][0]["products"]} == {1, 4}
    assert report["perplexity"]["tokens"] == 62


def layer_report(name: str, relative: float, **fields: Any) -> LayerReport:
    errors = Errors(relative=relative, nmse=0, max_error=relative / 2, rms_error=0)
    product = ProductReport(
        **{"activations": "random", "rows": 1, "reference": "weights"},
        **{"dtype": "float16", "errors": errors, "limit": 0.1},
    )
    given = {"operation": "linear", "format": "affine 4-bit", "is_ours": True, **fields}
    return LayerReport(name=name, products=(product,), **given)


def test_equal_layers_share_a_row_with_the_one_nearest_to_its_limit() -> None:
    reports = [
        *(layer_report(f"layers.{i}.up", (0.01, 0.05, 0.02)[i]) for i in range(3)),
        layer_report("layers.3.up", 0.03, format="mxfp4"),
        *(layer_report(f"layers.{i}.up", 0.9) for i in (4, 5)),
        layer_report("layers.6.up", math.nan),
        layer_report("layers.6.gate", 0.04),
        layer_report("layers.7.gate", 0.04, operation="lookup"),
    ]
    said = str(Report(backend="emulator", seed=0, layers=tuple(reports)))

    rows = re.findall(
        r"^(layers\S+).* (\d)  .*  (\S+) +(ok|FAILED)$", said, re.MULTILINE
    )
    assert rows == [
        ("layers.*.up", "3", "5.0e-02", "ok"),
        ("layers.3.up", "1", "3.0e-02", "ok"),
        ("layers.*.up", "3", "nan", "FAILED"),
        ("layers.6.gate", "1", "4.0e-02", "ok"),
        ("layers.7.gate,", "1", "4.0e-02", "ok"),
    ]
    for index, relative in ((4, "9.00e-01"), (5, "9.00e-01"), (6, "nan")):
        failure = f"against the weights: relative error {relative}, limit 1.00e-01"
        assert f"layers.{index}.up: 1 random rows, {failure}" in said


def test_one_wrong_code_fails(source: Path, model: Path, printed: Run) -> None:
    arrays = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj"
    arrays[f"{name}.weight"][5, 3] ^= np.uint32(1 << 8)
    save_file(arrays, model / "model.safetensors", {"format": "mlx"})

    out = printed("verify --apply", model, "--against", source, status=1)

    assert f"{name}: weights: 1 codes or scales are not the source's" in out
    assert "first at matrix 0, row 5, column 26" in out
    assert f"{name}: stays on stock MLX from now on" in out
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    assert config["mlx_marlin"]["stock_layers"] == [name]


def test_numbers_that_json_lacks_are_null(
    model: Path, printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = MarlinLinear.__call__
    monkeypatch.setattr(
        MarlinLinear, "__call__", lambda layer, x: own(layer, x) * float("nan")
    )

    written = printed("verify --rows 1 --json - ", model, status=1)

    errors = json.loads(written, parse_constant=pytest.fail)
    assert errors["layers"][0]["products"][0]["errors"]["relative"] is None
