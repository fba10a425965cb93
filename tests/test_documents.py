"""Links between documents lead somewhere, and the README says what is so."""

import re
from pathlib import Path

import pytest

from support import oracles

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]),
    *sorted(ROOT.glob("examples/*/README.md")),
    ROOT / "metal_emulator" / "README.md",
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS]
)
def test_every_relative_link_has_a_target(document: Path) -> None:
    for link in relative_links(document):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document

        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_document_is_linked_from_the_readme_or_the_records() -> None:
    indexes = ROOT / "README.md", ROOT / "docs" / "lab" / "README.md"
    linked = {
        (index.parent / link.partition("#")[0]).resolve()
        for index in indexes
        for link in relative_links(index)
    }

    documents = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    assert {path.resolve() for path in documents} <= linked


def test_the_errors_that_are_promised_are_the_tested_ones() -> None:
    promised = re.findall(r"(\d+e-\d+) \((\w+)\)", README)

    assert {dtype: float(bound) for bound, dtype in promised} == oracles.TOLERANCES


def test_every_environment_variable_is_listed() -> None:
    named = {
        name
        for package in ("mlx_marlin", "metal_emulator")
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r"MLX_MARLIN_[A-Z]+", path.read_text(encoding="utf-8"))
    }

    assert named == set(re.findall(r"`(MLX_MARLIN_[A-Z]+)`", README))
    assert len(named) <= 7
