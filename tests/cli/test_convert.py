"""`mlx-marlin convert` converts a folder and prints a line for each parameter."""

import re
from pathlib import Path

import pytest
from mlx_lm import utils

from cli.conftest import Run
from mlx_marlin.cli import demo
from mlx_marlin.lm.checkpoints.gguf_source import open_source
from mlx_marlin.tables import PIPED
from support import foreign_models
from support.foreign_models import LINEAR, write_llama


@pytest.fixture
def gptq(tmp_path: Path) -> str:
    """Returns the paths of a folder by GPTQ and of the result."""
    foreign_models.write(tmp_path / "source", "gptq")
    return f"{tmp_path / 'source'} {tmp_path / 'result'}"


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """Returns the paths of a folder with float16 weights and of the result."""
    write_llama(
        tmp_path / "source",
        lambda layer, weight: {f"{layer}.weight": weight.values.astype("float16")},
        {},
        bits=8,
    )
    return f"{tmp_path / 'source'} {tmp_path / 'result'}"


def test_a_folder_is_converted(gptq: str, tmp_path: Path, printed: Run) -> None:
    *_, last = lines = printed(f"convert {gptq}").splitlines()

    usual, heads, *rows = lines[:-1]
    assert usual.endswith("given: zero_point 4-bit, group 64, marlin layout.")
    assert heads.split() == ["parameter", "count", "format", "bytes", "error"]
    assert len(rows) == 3 + 2 + len(LINEAR)
    assert max(map(len, lines[:-1])) <= PIPED  # the last one has a path
    (row,) = [line for line in rows if "layers.*.mlp.down_proj" in line]
    assert row.split()[1] == "2"
    assert row.endswith("exact")
    assert last.startswith(f"21 parameters in {tmp_path / 'result'} take ")
    assert last.endswith("bytes; 0 of them rounded")
    assert (tmp_path / "result" / "model.safetensors").exists()


def test_a_dry_run_says_what_would_be_written(
    gptq: str, tmp_path: Path, printed: Run
) -> None:
    *_, last = printed(f"convert {gptq} --layout mlx --dry-run").splitlines()

    assert last.startswith("21 parameters would take ")
    assert last.endswith("bytes; 14 of them rounded")  # zero points as float16 biases
    assert not (tmp_path / "result").exists()


def test_plain_weights_are_quantized_if_an_option_asks_for_it(
    plain: str, tmp_path: Path, printed: Run
) -> None:
    options = "--layout mlx --bits 5 --quantizer search --group-size 32"
    *_, last = printed(f"convert {plain} {options}").splitlines()

    assert last.endswith("bytes; 16 of them rounded")
    _, config = utils.load_model(tmp_path / "result")
    assert config["quantization"] == {"bits": 5, "group_size": 32, "mode": "affine"}


def test_plain_weights_that_stay_plain_are_no_success(plain: str, printed: Run) -> None:
    said = printed(f"convert {plain} --dry-run")
    assert "nothing was quantized: plain weights stay" in said

    options = "--group-size 256 --only q_proj"
    *_, excluded, _ = lines = printed(f"convert {plain} {options}").splitlines()
    assert "nothing was quantized" in lines
    assert excluded == (
        "not quantized: model.layers.0.self_attn.q_proj.weight and 1 more, float16, "
        "65,536 bytes: 128 columns are no whole groups of 256"
    )


def test_embeddings_that_stay_plain_are_said(tmp_path: Path, printed: Run) -> None:
    options = "--bits 4 --embedding-bits plain --dry-run"
    assert (
        "not quantized: model.embed_tokens.weight, float16, 655,360 bytes: embeddings "
        "and the output head stay plain, as you asked\n"
    ) in printed(f"convert {options}", demo.checkpoint(), tmp_path / "result")


def test_a_name_on_the_hub_is_downloaded(
    plain: str, tmp_path: Path, printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str) -> Path:
        asked.append(name)
        return tmp_path / "source"

    monkeypatch.setattr("mlx_lm.utils._download", download)
    printed("convert an-owner/a-model", tmp_path / "result")
    assert asked == ["an-owner/a-model"]
    assert (tmp_path / "result" / "model.safetensors").exists()


def test_layer_10_comes_after_layer_9(
    request: pytest.FixtureRequest, printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_models, "LAYERS", 12)
    monkeypatch.setitem(foreign_models.CONFIG, "num_hidden_layers", 12)
    plain = request.getfixturevalue("plain")

    source = open_source(plain.split()[0])
    names = "\n".join(name for name, _ in source.parameters())

    layers = re.findall(r"^model\.layers\.(\d+)\.", names, re.MULTILINE)
    assert [*dict.fromkeys(layers)] == [str(layer) for layer in range(12)]
    lines = printed(f"convert {plain} --dry-run").splitlines()
    of_layers = [line.split()[:2] for line in lines if "layers" in line]
    assert {count for _, count in of_layers} == {"12"}
    assert len(of_layers) == len({name for name, _ in of_layers}) == 2 + len(LINEAR)
