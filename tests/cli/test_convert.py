"""`mlx-marlin convert` converts a folder and prints a line for each parameter."""

from pathlib import Path

import pytest
from mlx_lm import utils

from mlx_marlin.cli import main
from support import foreign_checkpoints as foreign
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

    assert "bytes; 15 of them rounded" in capsys.readouterr().out
    _, config = utils.load_model(tmp_path / "result")
    assert config["quantization"] == {"bits": 5, "group_size": 32, "mode": "affine"}


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
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
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
    assert f"{missing}: no such folder, expected one" in capsys.readouterr().err
