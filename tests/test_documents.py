"""Links of documents lead somewhere, and what documents list is what there is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import mlx_marlin
from support import oracles

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]),
    *sorted(ROOT.glob("examples/*/README.md")),
    ROOT / "metal_emulator" / "README.md",
]
README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
SOURCES = [*ROOT.glob("metal_emulator/**/*.py"), *ROOT.glob("mlx_marlin/**/*.py")]

TELLING = {"warnings.warn", "warn_once", "_warn"}
"""Functions that warn. Some pass a message on that another one was given."""


def prose(document: Path) -> str:
    """Returns a document's text without its code blocks."""
    text = document.read_text(encoding="utf-8")
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Returns the names that GitHub gives a document's headings."""
    headings = re.findall(r"^#+ (.*)", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def relative_links(document: Path) -> list[str]:
    """Returns the targets of links that stay in the repository."""
    links = re.findall(r"\]\(([^)\s]+)\)", prose(document))
    return [link for link in links if "://" not in link]


def test_every_relative_link_has_a_target() -> None:
    for document, link in [(d, link) for d in DOCUMENTS for link in relative_links(d)]:
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document

        assert target.exists(), (document, link)
        assert not anchor or anchor in anchors(target), (document, link)


def test_records_are_short() -> None:
    records = ROOT.glob("docs/lab/*.md")
    words = {each.name: len(each.read_bytes().split()) for each in records}

    assert {name for name, count in words.items() if count > 500} == set()
    assert sum(words.values()) <= 9_000


def test_every_document_is_linked_from_the_readme_or_the_records() -> None:
    linked = {
        (index.parent / link.partition("#")[0]).resolve()
        for index in (ROOT / "README.md", ROOT / "docs" / "lab" / "README.md")
        for link in relative_links(index)
    }

    documents = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    assert {path.resolve() for path in documents} <= linked
    examples = {path.parent.name for path in ROOT.glob("examples/*/README.md")}
    assert {*re.findall(r"\(examples/(\w+)/README\.md\)", README)} == examples


def test_the_errors_that_are_promised_are_the_tested_ones() -> None:
    promised = re.findall(r"(\d+e-\d+) \((\w+)\)", README)

    assert {dtype: float(bound) for bound, dtype in promised} == oracles.TOLERANCES


def test_every_environment_variable_is_listed() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    named = {*re.findall(r"MLX_MARLIN_[A-Z]+", text)}

    assert named == set(re.findall(r"`(MLX_MARLIN_[A-Z]+)`", REFERENCE))
    assert len(named) <= 7


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
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    found = {*messages()}

    assert len(found) >= 15
    assert {beginning for beginning in found if beginning not in text} == set()


def test_every_step_is_explained_and_run() -> None:
    folder = ROOT / "examples" / "naive_to_marlin"
    steps = [path.stem for path in sorted(folder.glob("*.metal"))]
    readme = (folder / "README.md").read_text(encoding="utf-8")

    assert re.findall(r"^\d\. \[`(\w+)\.metal`\]", readme, re.MULTILINE) == steps
    assert re.findall(r"^(0\w+) ", readme, re.MULTILINE) == steps


def test_an_install_that_is_told_exists() -> None:
    """Nothing is published under our names: somebody else could take them."""
    files = [*DOCUMENTS, *SOURCES, *ROOT.glob("examples/*/*.py"), ROOT / "Makefile"]
    told = {
        (file.name, line)
        for file in files
        for line in re.findall(r"pip install (.*)", file.read_text(encoding="utf-8"))
    }
    assert len(told) > 10
    ours = re.compile(r"['\"]?(mlx[-_]marlin|metal[-_]emulator)")
    assert not {each for each in told if ours.match(each[1])}


def test_the_reference_lists_the_public_names() -> None:
    section = REFERENCE.partition("## Functions")[2].partition("## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}

    assert listed | {"PackedWeight"} == {*mlx_marlin.__all__}  # what `pack` returns
    assert {*mlx_marlin.__all__} <= {*dir(mlx_marlin)}
