"""`docs/troubleshooting.md` explains every warning."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PACKAGES = ("metal_emulator", "mlx_marlin")
SOURCES = [file for name in PACKAGES for file in sorted((ROOT / name).rglob("*.py"))]

TELLING = {"warnings.warn", "warn_once", "_warn"}
"""Functions that warn. Some pass a message on that another one was given."""


def messages() -> Iterator[str]:
    """Yields how each message begins; of one that begins with a value, what follows."""
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        calls = TELLING | ({"decision_log.tell"} if "race" in path.parts else set())
        if not any(f"{name}(" in text for name in calls):
            continue  # parsing all of them takes a second
        tree = ast.parse(text)
        constants = {
            ast.unparse(node.targets[0]): node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in calls:
                is_first = ast.unparse(node.func) == "warnings.warn"
                message = node.args[0 if is_first else -1]
                message = constants.get(ast.unparse(message), message)
                if isinstance(message, ast.JoinedStr | ast.Constant):
                    yield from _beginning(message)


def _beginning(message: ast.JoinedStr | ast.Constant) -> Iterator[str]:
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    texts = [str(each.value) for each in parts if isinstance(each, ast.Constant)]
    texts = [
        each.removeprefix("mlx_marlin: ").removeprefix("metal_emulator: ")
        for each in texts
    ]
    if first := next(filter(None, texts), None):
        begins = isinstance(parts[0], ast.Constant) and first == texts[0]
        yield f"`{first.strip()}" if begins else first.strip(" .(")


def test_every_message_is_explained() -> None:
    found = {*messages()}

    assert len(found) >= 15
    assert {beginning for beginning in found if beginning not in TEXT} == set()
