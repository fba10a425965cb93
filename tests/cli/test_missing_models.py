"""A model that is not there is one sentence, before anything is imported or asked."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cli.conftest import Run
from mlx_marlin.cli import models
from mlx_marlin.cli.main import main
from support import auto_hook, foreign_models
from support.limits import limited
from support.processes import run_python
from support.profiles import sampled

POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""
COMMANDS = [
    *("report MODEL", "tune MODEL", "profile --model MODEL", "verify MODEL"),
    *("verify MODEL --against MODEL", "convert MODEL MODEL-out"),
    *("bench --model MODEL", "demo --model MODEL", "doctor --check --model MODEL"),
    *("lm generate --model MODEL", "lm server --model=MODEL"),
]


GGUF, LFS = "GGUF" + 20 * "\0", "is a pointer of Git LFS, expected the file itself"
MISSING: dict[str, tuple[str | dict[str, str] | None, str]] = {
    "missing": (None, "no such folder"),
    "empty": ({}, "is an empty folder, expected one with config.json and safetensors"),
    "without a config": ({"README.md": "text"}, "no config.json"),
    "without weights": ({"config.json": "{}"}, "no safetensors file"),
    "text": ("text", "is a file, expected a folder or a .gguf file"),
    "unnamed": (GGUF, "is a GGUF file, expected a name that ends in .gguf: rename it"),
    "pointer": (
        {"config.json": "{}", "model.safetensors": POINTER},
        f"{LFS}: run `git lfs pull`",
    ),
    "pointer to GGUF": ({"model.gguf": POINTER}, f"model.gguf {LFS}"),
    "two files": (
        {"a.gguf": "GGUF", "b.gguf": "GGUF"},
        "holds 2 GGUF files, expected one: give the path of one, such as",
    ),
}
"""What a path is, a file, a folder of files or nothing, and what is said of it."""


def make_missing(path: Path, kind: str) -> str:
    """Makes what a path is; returns what is said of it."""
    content, expected = MISSING[kind]
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.mkdir()
        for name, text in content.items():
            (path / name).write_text(text)
    return expected


def complete(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    mx.save_safetensors(str(path / "model"), {"a": mx.zeros(1)})


def with_fifo(name: str) -> Callable[[Path], str]:
    def make(path: Path) -> str:
        complete(path)
        (path / name).unlink(missing_ok=True)
        (path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(path / name)
        return f"{name}: a FIFO, expected a regular file"

    return make


def with_zeros(path: Path) -> str:
    complete(path)
    (path / "tokenizer.json").symlink_to("/dev/zero")
    return "tokenizer.json: a device, expected a regular file"


def with_large_tokenizer(path: Path) -> str:
    complete(path)
    (path / "tokenizer.json").touch()
    os.truncate(path / "tokenizer.json", 2**40)
    return "tokenizer.json: 1099511627776 bytes, expected at most"


def with_endless_layers(path: Path) -> str:
    complete(path)
    config = {"model_type": "llama", "text_config": {"num_hidden_layers": 10**9}}
    (path / "config.json").write_text(json.dumps(config))
    return "config.json: num_hidden_layers is 1000000000, expected at most 1000,"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", MISSING)
def test_a_path_without_a_model_is_one_sentence(
    tmp_path: Path,
    command: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = make_missing(tmp_path / "model", kind)

    assert main(command.replace("MODEL", "./model").split()) == 2

    error = capsys.readouterr().err
    assert expected in error
    assert "Errno" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "make",
    [
        *map(with_fifo, ("config.json", "model.safetensors", "tokenizer.json")),
        *map(with_fifo, ("special_tokens_map.json", "additional_chat_templates/a")),
        with_zeros,
        with_large_tokenizer,
        with_endless_layers,
    ],
)
@pytest.mark.parametrize("command", [COMMANDS[0], COMMANDS[3], COMMANDS[5]])
def test_a_model_with_an_endless_file_is_refused(
    tmp_path: Path, command: str, make: Any, refused: Run
) -> None:
    path = tmp_path / "model"
    expected = make(path)

    with limited():
        error = refused(command.replace("MODEL", str(path)), loads=True)

    assert expected in error
    assert str(path) in error


def test_a_name_of_the_hub_is_announced_and_its_error_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    try:
        assert main(["lm", "generate", "--model", "nobody/nothing"]) == 2
    finally:
        auto_hook.remove()

    first, second = capsys.readouterr().err.strip().splitlines()
    assert first.startswith("loading nobody/nothing from the Hugging Face Hub")
    assert second.startswith("mlx-marlin: error: the Hugging Face Hub did not answer")


@pytest.mark.parametrize("command", COMMANDS[:5] + COMMANDS[-2:])
def test_mlx_lm_is_not_imported_for_a_missing_model(command: str) -> None:
    words = command.replace("MODEL", "./none").split()
    code = (
        "import sys\nfrom mlx_marlin.cli.main import main\n"
        f"assert main({words}) == 2\n"
        "print({'mlx_lm', 'transformers', 'huggingface_hub'} & {*sys.modules})"
    )
    ran = run_python(code)
    assert (ran.returncode, ran.stdout) == (0, "set()\n"), ran.stderr


VALUES = [0, 1, -1, 1.5, None, "x", [], {}, [1], 10**9]


def refusal(path: Path) -> str:
    """Loads a model; returns why it is refused, or its path."""
    try:
        models.load(str(path), lazy=True)
    except ValueError as error:
        return str(error)
    return str(path)


@sampled(11)
@pytest.mark.parametrize("key", [*foreign_models.CONFIG, "rope_theta", "rope_scaling"])
@pytest.mark.parametrize("of", ["MLX", "GPTQ"])
def test_every_value_of_a_config_is_loaded_or_refused(
    tmp_path: Path, folder: Path, key: str, of: str
) -> None:
    path = tmp_path / "model"
    if of == "MLX":
        shutil.copytree(folder, path)
    else:
        foreign_models.write(path, "gptq")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(folder / name, path / name)
    models.load(str(path), lazy=True)
    config = json.loads((path / "config.json").read_text())

    for value in VALUES:
        (path / "config.json").write_text(json.dumps(config | {key: value}))
        with limited():
            assert str(path) in refusal(path), value
