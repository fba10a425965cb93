"""`docs/troubleshooting.md` explains every warning, variable and command it should."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_marlin.cli import COMMANDS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SOURCES = sorted((ROOT / "mlx_marlin").rglob("*.py"))


def warnings() -> Iterator[str]:
    """Yields how each warning of the package begins, up to its first value."""
    texts = [path.read_text(encoding="utf-8") for path in SOURCES]
    for text in texts:
        if "warnings.warn" not in text:  # parsing all of them takes a second
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                yield _beginning(node.args[0])


def _beginning(text: ast.expr) -> str:
    if isinstance(text, ast.JoinedStr):
        text = text.values[0]
    assert isinstance(text, ast.Constant), ast.dump(text)
    return str(text.value).removeprefix("mlx_marlin: ").strip()


def test_there_are_warnings() -> None:
    assert len([*warnings()]) >= 2


@pytest.mark.parametrize("beginning", [*warnings()])
def test_every_warning_is_explained(beginning: str) -> None:
    assert f"`{beginning}" in TEXT


def test_every_variable_is_explained() -> None:
    names = re.compile(r"MLX_MARLIN_[A-Z]+(?:_[A-Z]+)*")
    read = {name for path in SOURCES for name in names.findall(path.read_text("utf-8"))}

    assert read
    assert read <= {*names.findall(TEXT)}


def test_the_commands_it_shows_exist() -> None:
    shown = set(re.findall(r"mlx-marlin (\w+)", TEXT))

    assert shown <= {*COMMANDS, "cache"}


def test_the_readme_links_it() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert "](docs/troubleshooting.md)" in readme
