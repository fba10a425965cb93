"""The HTML page: one file without external resources."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from mlx_marlin.cli.pictures import figures, plots
from mlx_marlin.cli.pictures.charts import Chart
from mlx_marlin.cli.render import html_tables
from mlx_marlin.cli.render.html import Markup, element, joined
from mlx_marlin.tables import Table

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
    yield from map(html_tables.section, page.tables)
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
    image = figures.content(lambda: plots.figure([chart]), ".svg")
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
