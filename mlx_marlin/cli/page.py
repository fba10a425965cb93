"""The HTML page: one file without external resources."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path

from mlx_marlin.cli.pictures import figures
from mlx_marlin.cli.pictures.charts import Chart
from mlx_marlin.tables import (
    FIGURES,
    KEPT,
    SOURCE,
    SOURCES,
    Table,
    Value,
    columns,
    is_number,
    text,
)

VOID = ("img", "meta")
"""Elements without content, which have no end tag."""


class Markup(str):
    """HTML, in contrast to a text, which has to be escaped."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """Returns an element."""
    listed = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    content = "".join(map(_escaped, children))
    end = "" if tag in VOID else f"</{tag}>"
    return Markup(f"<{tag}{listed}>{content}{end}")


def joined(*children: str) -> Markup:
    """Returns elements and texts, the latter escaped, one after the other."""
    return Markup("".join(map(_escaped, children)))


def _escaped(child: str) -> str:
    return child if isinstance(child, Markup) else escape(child)


LONG = 18
"""Characters from which the text of a cell is broken into lines."""
MISSING = "\N{EN DASH}"
BADGES = {"IMPOSSIBLE": "failed", "timed out": "failed"} | {
    name: name for name in (*SOURCES, "passed", "failed")
}
"""Texts that are highlighted, and the class."""


def section(table: Table) -> Markup:
    """Returns a table with its heading; nothing without rows."""
    if not table.rows:
        return Markup("")
    kept, same = columns(table)
    numbers = {head for head in kept if any(is_number(r[head]) for r in table.rows)}
    heads = [
        element("th", head, scope="col", class_="number" if head in numbers else None)
        for head in kept
    ]
    rows = [
        element(
            "tr",
            *(_cell(head, row[head], head in numbers) for head in kept),
            class_=row.get(SOURCE),
        )
        for row in table.rows
    ]
    parts = [element("h2", table.title)]
    if same:
        parts.append(element("p", same, class_="same"))
    drawn = element(
        "table", element("thead", element("tr", *heads)), element("tbody", *rows)
    )
    return element("section", *parts, element("div", drawn, class_="table"))


def _cell(head: str, value: Value, is_right: bool) -> Markup:
    """Returns a cell; a phone shows the name of the column beside it."""
    shown = text(value)
    badge = BADGES.get(shown) if head in KEPT else None
    classes = {
        "number": is_right,
        "figure": head in FIGURES,
        "long": len(shown) > LONG,
        "missing": not shown,
    }
    return element(
        "td",
        element("span", shown, class_=f"badge {badge}") if badge else shown or MISSING,
        class_=" ".join(name for name, applies in classes.items() if applies) or None,
        data_head=head,
        data_value=repr(value) if is_number(value) else None,
    )


FOLDER = Path(__file__).parent
MARKS = (
    "Measured figures are upright, their markers are filled and their lines solid. "
    "All others are italic, with hollow markers and dashed lines."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a page shows."""

    title: str  # Its title
    subtitle: str  # A line below the title
    # What is known of the machine: names and values; those without a value are left out
    facts: Sequence[tuple[str, str]]
    charts: Sequence[Chart]  # The charts
    tables: Sequence[Table]  # The tables; those without rows are left out
    notes: Sequence[str]  # Further lines of text
    origin: str  # What the page was made from


def html(page: Page) -> str:
    """Returns a page as HTML. The same page gives the same text."""
    style, script = (FOLDER / name for name in ("page.css", "page.js"))
    css, code = (Markup(file.read_text("utf-8")) for file in (style, script))
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(css)}'; "
        f"script-src '{_digest(code)}'"
    )
    head = joined(
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("title", page.title),
        element("style", css),
    )
    body = joined(element("main", *_content(page)), element("script", code))
    document = element("html", element("head", head), element("body", body), lang="en")
    return f"<!doctype html>\n{document}\n"


def _digest(text: str) -> str:
    """Returns what names a text in a content security policy."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _content(page: Page) -> Iterable[Markup]:
    yield element("h1", page.title)
    yield element("p", page.subtitle, class_="subtitle")
    yield _notice({source for table in page.tables for source in table.sources})
    yield _facts(page.facts)
    if page.charts:
        yield _charts(page.charts)
    yield from map(section, page.tables)
    if page.notes:
        notes = element("ul", *(element("li", note) for note in page.notes))
        yield element("section", element("h2", "Notes"), notes)
    yield element("footer", f"Made by mlx-marlin render from {page.origin}.")


def _charts(charts: Sequence[Chart]) -> Markup:
    """Returns the charts as images in the page, or how to get them."""
    try:
        figures.require("--output")
    except ImportError as error:
        return element("p", f"The charts are missing: {error}.")
    return element("div", *map(_chart, charts), class_="figures")


def _chart(chart: Chart) -> Markup:
    image = figures.content(lambda: figures.figure([chart]), ".svg")
    data = f"data:image/svg+xml;base64,{b64encode(image).decode()}"
    return element("figure", element("img", src=data, alt=chart.title))


def _notice(found: set[str]) -> Markup:
    """Returns what a reader has to know of the times of the page."""
    text = f"The times on this page are {' or '.join(sorted(found))}."
    if not found:
        text = "The document has no times."
    elif "measured" not in found:
        text += " Nothing was measured."
    kind = "measured" if found == {"measured"} else "predicted"
    lines = [element("p", element("strong", text)), element("p", MARKS)]
    return element("div", *lines, class_=f"notice {kind}")


def _facts(facts: Sequence[tuple[str, str]]) -> Markup:
    entries = [
        element("div", element("dt", name), element("dd", value))
        for name, value in facts
        if value
    ]
    return element("dl", *entries) if entries else Markup("")
