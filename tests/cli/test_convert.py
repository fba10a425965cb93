"""`mlx-marlin convert` converts a folder and prints a line for each parameter."""

import re
from pathlib import Path

import pytest
from mlx_lm import utils

from mlx_marlin.cli import convert
from mlx_marlin.cli.demo import command as demo
from mlx_marlin.cli.main import main
from mlx_marlin.planning.choice import WIDTH
from support import foreign_checkpoints as foreign
from support import foreign_models
from support.foreign_models import LINEAR, write_llama


def gptq(path: Path) -> None:
    write_llama(
        path,
        lambda layer, weight: foreign.gptq_arrays(layer, weight, 2),
        foreign.gptq_config(4, 2),
        bits=4,
    )


def plain(path: Path) -> None:
    write_llama(
        path,
        lambda layer, weight: {f"{layer}.weight": weight.values.astype("float16")},
        {},
        bits=8,
    )


def test_a_folder_is_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gptq(tmp_path / "source")

    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "result")]) == 0

    *_, last = lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 3 + 2 * (2 + len(LINEAR)) + 1
    assert len({line.rindex(" ") for line in lines[:-1]}) == 1  # one column of errors
    assert max(map(len, lines[:-1])) <= WIDTH  # the last one has a path
    (row,) = [line for line in lines if "layers.1.mlp.down_proj" in line]
    assert "zero_point 4-bit, group 64, marlin layout" in row
    assert row.endswith("exact")
    assert last.startswith(f"21 parameters in {tmp_path / 'result'} take ")
    assert last.endswith("bytes; 0 of them rounded")
    assert (tmp_path / "result" / "model.safetensors").exists()


def test_a_dry_run_says_what_would_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gptq(tmp_path / "source")
    paths = [str(tmp_path / "source"), str(tmp_path / "result")]

    assert main(["convert", *paths, "--layout", "mlx", "--dry-run"]) == 0

    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("21 parameters would take ")
    assert last.endswith("bytes; 14 of them rounded")  # zero points as float16 biases
    assert not (tmp_path / "result").exists()


def test_plain_weights_are_quantized_if_an_option_asks_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain(tmp_path / "source")
    paths = [str(tmp_path / "source"), str(tmp_path / "result")]

    options = ["--layout", "mlx", "--bits", "5", "--quantizer", "search"]
    assert main(["convert", *paths, *options, "--group-size", "32"]) == 0

    *_, last = capsys.readouterr().out.splitlines()
    assert last.endswith("bytes; 16 of them rounded")
    _, config = utils.load_model(tmp_path / "result")
    assert config["quantization"] == {"bits": 5, "group_size": 32, "mode": "affine"}


def test_plain_weights_that_stay_plain_are_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain(tmp_path / "source")
    paths = [str(tmp_path / "source"), str(tmp_path / "result")]

    assert main(["convert", *paths, "--dry-run"]) == 0
    assert "nothing was quantized: plain weights stay" in capsys.readouterr().out

    assert main(["convert", *paths, "--mode", "affine", "--group-size", "96"]) == 2
    words = ["--group-size", "256", "--only", "q_proj"]
    assert main(["convert", *paths, *words]) == 0
    *_, excluded, _ = lines = capsys.readouterr().out.splitlines()
    assert "nothing was quantized" in lines
    assert excluded == (
        "not quantized: model.layers.0.self_attn.q_proj.weight and 1 more, float16, "
        "65,536 bytes: 128 columns are no whole groups of 256"
    )


def test_embeddings_that_stay_plain_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(demo.checkpoint()), str(tmp_path / "result")]

    words = ["--bits", "4", "--embedding-bits"]
    assert main(["convert", *paths, *words, "plain", "--dry-run"]) == 0
    assert (
        "not quantized: model.embed_tokens.weight, float16, 655,360 bytes: embeddings "
        "and the output head stay plain, as you asked\n"
    ) in capsys.readouterr().out
    assert main(["convert", *paths, *words, "9"]) == 2
    assert "embedding_bits=9, expected one of (0, 1, 2," in capsys.readouterr().err


def test_a_name_on_the_hub_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain(tmp_path / "source")
    asked = []

    def download(name: str) -> Path:
        asked.append(name)
        return tmp_path / "source"

    monkeypatch.setattr("mlx_lm.utils._download", download)
    assert main(["convert", "an-owner/a-model", str(tmp_path / "result")]) == 0
    assert asked == ["an-owner/a-model"]
    assert (tmp_path / "result" / "model.safetensors").exists()


def test_layer_10_comes_after_layer_9(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(foreign_models, "LAYERS", 12)
    monkeypatch.setitem(foreign_models.CONFIG, "num_hidden_layers", 12)
    plain(tmp_path / "source")
    paths = [str(tmp_path / "source"), str(tmp_path / "result")]

    assert main(["convert", *paths, "--dry-run"]) == 0

    out = capsys.readouterr().out
    layers = re.findall(r"^model\.layers\.(\d+)\.", out, re.MULTILINE)
    assert [*dict.fromkeys(layers)] == [str(layer) for layer in range(12)]


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("model.norm.weight", "float16"),
        ("n" * 60, "zero_point 4-bit, group 128, marlin layout, x gathered"),
        ("n" * 39, "zero_point 4-bit, group channel, marlin layout, order folded"),
    ],
)
def test_lines_have_equal_ends(name: str, format: str) -> None:
    line = convert._line(name, format, "1,234,567,890", "4.60e-02")

    *names, last = line.split("\n")
    assert [*map(str.strip, names)] in ([], [name])
    assert len(last) == WIDTH
    assert last.endswith(" 1,234,567,890 4.60e-02")
    assert format in last


def test_an_error_comes_without_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gptq(tmp_path / "source")
    (tmp_path / "result").mkdir()
    paths = [str(tmp_path / "source"), str(tmp_path / "result")]

    assert main(["convert", *paths]) == 2

    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layout", "other"], "layout='other', expected one of ['marlin', 'mlx']"),
        (["--only", "("], "only='(' is not a pattern"),
        (["--group-size", "x"], "--group-size 'x', expected a number or channel"),
        (["--bits", "9"], "bits=9"),
        (["--quantizer", "best"], "quantizer='best', expected one of"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    gptq(tmp_path / "source")
    paths = [str(tmp_path / "source"), str(tmp_path / "result")]

    assert main(["convert", *paths, *options]) == 2

    assert message in capsys.readouterr().err
    assert not (tmp_path / "result").exists()


def test_a_missing_folder_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    assert main(["convert", str(missing), str(tmp_path / "result")]) == 2
    assert f"{missing}: no such folder or file" in capsys.readouterr().err
