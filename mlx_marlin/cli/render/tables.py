"""Tables of the page: columns of texts and numbers, and where they come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from mlx_marlin.cli.render.html import Markup, element

MISSING = "\N{EN DASH}"
SOURCES = ("measured", "predicted", "assumed")
UNKNOWN = "unknown"
"""Source of a figure of which the document does not say where it comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell.

    Attributes:
        text: What it shows; "" if it is missing.
        value: The number to sort by; None for a text.
        is_figure: Whether it depends on a time that is measured or predicted.
        badge: A class that highlights it, or None.
    """

    text: str
    value: float | None = None
    is_figure: bool = False
    badge: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table.

    Attributes:
        title: Its heading.
        heads: Names of the columns.
        rows: The rows, each with a cell for each column.
        sources: Where the figures of each row come from: one of `SOURCES`, or
            `UNKNOWN`; "" for a row without figures.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    sources: Sequence[str]


def text_cell(text: str, badge: str | None = None) -> Cell:
    """Returns a cell with a text."""
    return Cell(text=text, badge=badge)


def number_cell(
    value: float | None, digits: int = 4, is_figure: bool = False, unit: str = ""
) -> Cell:
    """Returns a cell with a number.

    Args:
        value: The number; None if it is missing.
        digits: Digits that are shown.
        is_figure: Whether it depends on a time.
        unit: Text behind the number.
    """
    if value is None:
        return Cell(text="")
    return Cell(text=number(value, digits) + unit, value=value, is_figure=is_figure)


def number(value: float, digits: int) -> str:
    """Returns a number with some digits, without an exponent where that is short."""
    if value == int(value) and abs(value) < 1e9:
        return f"{value:.0f}"
    short = f"{value:.{digits}g}"
    return f"{Decimal(short):f}" if 1e-4 <= abs(value) < 1e9 else short


def source_cell(source: str) -> Cell:
    """Returns the cell that says where the figures of a row come from."""
    return Cell(text=source, badge=source)


def source(text: str) -> str:
    """Returns a source that the page knows."""
    return text if text in SOURCES else UNKNOWN


def section(table: Table) -> Markup:
    """Returns a table with its heading; nothing without rows.

    Columns without any text are left out.
    """
    kept = [
        index
        for index in range(len(table.heads))
        if any(row[index].text for row in table.rows)
    ]
    if not kept:
        return Markup("")
    heads = [table.heads[index] for index in kept]
    numeric = [
        any(row[index].value is not None for row in table.rows) for index in kept
    ]
    head = element(
        "tr",
        *(
            element("th", name, scope="col", class_="number" if right else None)
            for name, right in zip(heads, numeric, strict=True)
        ),
    )
    rows = [
        _row([row[index] for index in kept], heads, numeric, source)
        for row, source in zip(table.rows, table.sources, strict=True)
    ]
    drawn = element("table", element("thead", head), element("tbody", *rows))
    return element(
        "section", element("h2", table.title), element("div", drawn, class_="table")
    )


def _row(
    cells: Sequence[Cell], heads: Sequence[str], numeric: Sequence[bool], source: str
) -> Markup:
    """Returns a row.

    Args:
        cells: Its cells.
        heads: The names of their columns, which a phone shows beside them.
        numeric: Which columns have numbers.
        source: Where its figures come from.
    """
    drawn = [
        _cell(cell, head, right)
        for cell, head, right in zip(cells, heads, numeric, strict=True)
    ]
    return element("tr", *drawn, class_=source or None)


def _cell(cell: Cell, head: str, is_number: bool) -> Markup:
    classes = [
        name
        for name, applies in (("number", is_number), ("figure", cell.is_figure))
        if applies
    ]
    text: str = cell.text or MISSING
    if cell.badge:
        text = element("span", text, class_=f"badge {cell.badge}")
    return element(
        "td",
        text,
        class_=" ".join(classes) or None,
        data_head=head,
        data_value=None if cell.value is None else repr(cell.value),
    )
