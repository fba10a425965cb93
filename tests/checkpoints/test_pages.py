"""Snippets and commands of docs/import.md and docs/formats.md run as they are."""

import re
import shlex
from pathlib import Path
from shutil import copyfile
from typing import Any

import mlx.core as mx
import pytest

from mlx_marlin.cli.demo import command as demo
from mlx_marlin.cli.main import main
from support import foreign_checkpoints as foreign
from support.foreign_models import write_llama

DOCS = Path(__file__).parents[2] / "docs"
SOURCES = {
    "Qwen3-8B-GPTQ-Int4": (
        lambda layer, weight: foreign.gptq_arrays(layer, weight, 2),
        foreign.gptq_config(4, 2),
        {"bits": 4},
    ),
    "Qwen3-8B-AWQ": (foreign.awq_arrays, foreign.awq_config(), {"bits": 4}),
    "Qwen3-8B": (
        lambda layer, weight: {f"{layer}.weight": weight.values.astype("float16")},
        {},
        {"bits": 8},
    ),
}
"""Checkpoints that the page names: small ones take their places."""
VOCABULARY = 1024
"""Tokens of the demo's tokenizer."""


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for of, block in found if of == language]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the checkpoints that the page names, and a text."""
    folder = tmp_path_factory.mktemp("documents")
    for name, (arrays, config, options) in SOURCES.items():
        config = config | {"vocab_size": VOCABULARY}
        write_llama(folder / name, arrays, config, **options)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            copyfile(demo.checkpoint() / file, folder / name / file)
    (folder / "sample.txt").write_text("def main():\n    pass\n" * 20)
    return folder


@pytest.mark.usefixtures("kernels")
def test_the_import_page_runs(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """First its Python, whose results its commands would overwrite, then these."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    for block in blocks("import.md", "python"):
        exec(compile(block, "import.md", "exec"), names)

    assert names["weight"].ndim == 2
    assert names["report"].passed
    assert (folder / "qwen3-packed" / "config.json").is_file()
    (folder / "qwen3-packed").rename(folder / "by-python")
    text = "".join(blocks("import.md", ""))
    for line in re.findall(r"^mlx-marlin (.*?)\s*(?:#.*)?$", text, re.MULTILINE):
        assert main(shlex.split(line)) == 0, capsys.readouterr()
    assert (folder / "report.json").is_file()


@pytest.mark.usefixtures("kernels")
def test_the_page_of_formats_runs() -> None:
    names: dict[str, Any] = {}
    for block in blocks("formats.md", "python"):
        exec(compile(block, "formats.md", "exec"), names)

    expected = mx.quantized_matmul(
        names["x"], names["w"], names["scales"], names["biases"]
    )
    assert mx.allclose(names["y"], expected, atol=1e-3)
