"""What all commands share: the help, its guide, and `--json [FILE]`."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from mlx_marlin.cli.main import COMMANDS, GUIDE, main
from support import quantized_folder
from support.marks import needs_emulator
from support.processes import run_python
from support.profiles import sampled


def guided(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Returns the command lines that the guide of `--help` shows, as words."""
    with pytest.raises(SystemExit):
        main(["--help"])
    _, guide = capsys.readouterr().out.split("what you want:\n")
    lines = guide.split("\n\n")[0].splitlines()
    return [shlex.split(line[line.index("mlx-marlin ") :])[1:] for line in lines]


def test_the_guide_names_every_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(words[0] for words in guided(capsys)) == sorted(COMMANDS)


def test_the_help_fits_a_terminal_and_lists_every_command_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])

    said = capsys.readouterr().out
    commands, _, _ = said.split("COMMAND\n")[1].partition("\n\n")
    listed = [line.split(maxsplit=1) for line in commands.splitlines()]
    assert listed == [[name, text] for name, text in COMMANDS.items()]
    assert listed[0][0] == "plan"
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("wish", GUIDE)
def test_a_command_of_the_guide_takes_its_arguments(
    wish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(GUIDE[wish])[1:]
    seen: list[object] = []
    module = f"mlx_marlin.cli.{words[0]}"
    monkeypatch.setattr(f"{module}.run", lambda args: seen.append(args) or 0)

    assert main(words) == 0
    assert len(seen) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_machine_has_timed_is_called_measured(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])

    said = capsys.readouterr().out
    assert f"mlx-marlin {command}" in said
    assert re.findall(r"\btuned\b", said) == []


def test_no_help_but_that_of_the_emulator_needs_an_extra_package() -> None:
    commands = [name for name in COMMANDS if name != "emulate"]
    program = f"""
import sys
sys.modules.update(dict.fromkeys(["numpy", "mlx_lm", "matplotlib", "tqdm"]))
from mlx_marlin.cli.main import main
for command in {commands}:
    try:
        main([command, "--help"])
    except SystemExit:
        pass
"""
    answer = run_python(program)

    shown = [line for line in answer.stdout.splitlines() if line.startswith("usage")]
    assert [line.split()[2] for line in shown] == commands, answer.stderr


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
