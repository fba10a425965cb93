"""One spelling of `--json [FILE]` and of shapes in all commands, and the old ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from mlx_marlin.cli.main import COMMANDS, main
from support import quantized_folder
from support.marks import needs_emulator
from support.profiles import sampled

KERNEL = "y[thread_position_in_grid.x] = 1.0f;"
GIVES_JSON = {
    "plan": "8x64x128 --chip M3",
    "cache": "",
    "doctor": "",
    "report": "model --chip M3",
    "profile": "--single-config 8x64x128 --chip M3",
    "verify": "model --rows 1",
    "bench": "1x64x64 --seconds 0.01",
    "tune": "1x64x64",
    "emulate": "kernel.metal --grid 4 --output y=4:float32",
}
"""Commands with a result that is no text, and arguments."""


@pytest.fixture
def folder(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kernel.metal").write_text(KERNEL)
    quantized_folder.write(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@sampled(3)
@needs_emulator
@pytest.mark.parametrize("command", GIVES_JSON)
def test_json_is_printed_alone_or_written_beside_the_text(
    command: str, folder: Path, printed: Run, refused: Run
) -> None:
    line = f"{command} {GIVES_JSON[command]} --json"

    alone = json.loads(printed(line))
    text = printed(f"{line} result.json")
    written = json.loads((folder / "result.json").read_text())

    assert shape_of(written) == shape_of(alone)
    assert text
    assert not text.startswith(("{", "["))
    said = "--json none/result.json: the folder none"
    assert said in refused(f"{line} none/result.json")


def shape_of(value: Any) -> Any:
    """Returns a value without its numbers, which may be times."""
    if isinstance(value, dict):
        return {key: shape_of(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape_of(each) for each in value]
    return type(value)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_option_is_the_same_in_all_commands(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])

    text = capsys.readouterr().out
    assert ("--json [FILE]" in text) == (command in GIVES_JSON)


@pytest.mark.parametrize(
    "words", ["8 64 128 --json", "8,64,128 --json --bits 4", "8x64x128 --json -"]
)
def test_old_spellings_of_a_plan_are_accepted(words: str, printed: Run) -> None:
    problem = json.loads(printed(f"plan {words} --chip M3"))["problem"]

    assert [problem[name] for name in "mnk"] == [8, 64, 128]
