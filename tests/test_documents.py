"""Links between documents lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]),
    *sorted(ROOT.glob("examples/*/README.md")),
    ROOT / "metal_emulator" / "README.md",
]


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

    assert {path.resolve() for path in ROOT.glob("docs/**/*.md")} <= linked
