"""`mlx-marlin --help` leads to every command."""

import re
import shlex

import pytest

from mlx_marlin.cli.main import COMMANDS, GUIDE, main


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
