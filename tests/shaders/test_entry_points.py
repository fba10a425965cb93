"""What the bodies of products pass: a few structs, not a dozen arguments."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_marlin.backends import source

FOLDER = source.shader_folder()
BODIES = sorted(
    path
    for folder, suffix in (("kernels", "metal"), ("cuda", "cu"))
    for path in (FOLDER / folder).glob(f"*.{suffix}")
    if re.match("gem|gather|dequantize|reduce|mma|wgmma", path.name)
)
MOST_ARGUMENTS = 6
MOST_TEMPLATE_ARGUMENTS = 4


def parts_of(text: str) -> tuple[list[str], str]:
    """Returns what commas separate in the brackets that begin a text, and the rest."""
    depth, first, parts = 0, 1, []
    for at, char in enumerate(text):
        depth += (char in "(<[{") - (char in ")>]}")
        if depth == 0 or (depth == 1 and char == ","):
            parts.append(text[first:at].strip())
            first = at + 1
        if depth == 0:
            return parts, text[first:]
    raise ValueError(f"unbalanced brackets in {text[:40]!r}")


def entries_of(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yields the template arguments and the arguments of each statement's call."""
    code = re.sub("//.*", "", text)
    for call in re.finditer(r"^ *marlin::\w+(?=[<(])", code, re.MULTILINE):
        rest = code[call.end() :]
        template: list[str] = []
        if rest.startswith("<"):
            template, rest = parts_of(rest)
        if rest.startswith("("):
            yield template, parts_of(rest)[0]


@pytest.mark.parametrize(
    "path", BODIES, ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_an_entry_point_takes_a_few_structs(path: Path) -> None:
    calls = [*entries_of(path.read_text())]

    assert calls
    for template, arguments in calls:
        assert len(arguments) <= MOST_ARGUMENTS
        assert len(template) <= MOST_TEMPLATE_ARGUMENTS


@pytest.mark.parametrize("name", ["split_at", "range_of_threadgroup"])
def test_only_the_iterator_steps_through_splits(name: str) -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    users = {path.name for path in files if re.search(rf"\b{name}<", path.read_text())}

    assert users == {"work.metal"}
