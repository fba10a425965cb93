"""What the README shows is what happens."""

import re
import shlex
from pathlib import Path

import pytest

from mlx_marlin.cli.main import COMMANDS, main
from support import oracles

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_first_python_block_prints_what_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    block, said = re.search(
        r"```python\n(.*?)```\n\nprints `(.*?)`", README, re.DOTALL
    ).groups()

    exec(compile(block, "README.md", "exec"), {})

    assert capsys.readouterr().out.strip() == said


def test_every_command_shown_is_one_of_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = [shlex.split(line) for line in re.findall(r"\$ mlx-marlin (.*)", README)]

    assert shown
    for words in shown:
        assert words[0] in COMMANDS
        if words[0] != "demo":
            assert main(words) == 0
            assert "(model, not measured)" in capsys.readouterr().out


def test_the_errors_that_are_promised_are_the_tested_ones() -> None:
    promised = re.findall(r"(\d+e-\d+) \((\w+)\)", README)

    assert {dtype: float(bound) for bound, dtype in promised} == oracles.TOLERANCES


def test_every_environment_variable_is_listed() -> None:
    root = Path(__file__).parents[1]
    named = {
        name
        for package in ("mlx_marlin", "metal_emulator")
        for path in (root / package).rglob("*.py")
        for name in re.findall(r"MLX_MARLIN_[A-Z]+", path.read_text(encoding="utf-8"))
    }

    assert named == set(re.findall(r"`(MLX_MARLIN_[A-Z]+)`", README))
    assert len(named) <= 7
