"""Tables of the page: columns of texts and numbers, and where they come from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from mlx_marlin.cli.render.html import Markup, element

LONG = 18
"""Characters from which the text of a cell is broken into lines."""
MANY = 4
"""Rows from which a column with one text is left out of a table."""
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


def number_cell(value: float | None, digits: int = 4, is_figure: bool = False) -> Cell:
    """Returns a cell with a number.

    Args:
        value: The number; None or infinity if it is missing.
        digits: Digits that are shown.
        is_figure: Whether it depends on a time.
    """
    if value is None or not math.isfinite(value):
        return Cell(text="")
    return Cell(text=number(value, digits), value=value, is_figure=is_figure)


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

    Columns without any text are left out, and those with the same text in many rows are
    a line above the table, but for the sources.
    """
    if not table.rows:
        return Markup("")
    columns = [
        _Column(head=head, cells=tuple(cells))
        for head, *cells in zip(table.heads, *table.rows, strict=True)
    ]
    columns = [column for column in columns if any(cell.text for cell in column.cells)]
    same = [column for column in columns if column.is_same]
    kept = [column for column in columns if not column.is_same]
    heads = [
        element("th", column.head, scope="col", class_=column.classes)
        for column in kept
    ]
    rows = [
        element("tr", *(_cell(column, index) for column in kept), class_=source or None)
        for index, source in enumerate(table.sources)
    ]
    parts = [element("h2", table.title)]
    if same:
        listed = "; ".join(f"{column.head}: {column.cells[0].text}" for column in same)
        parts.append(element("p", f"In all rows: {listed}.", class_="same"))
    drawn = element(
        "table", element("thead", element("tr", *heads)), element("tbody", *rows)
    )
    return element("section", *parts, element("div", drawn, class_="table"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column of a table."""

    head: str
    cells: tuple[Cell, ...]

    @property
    def is_same(self) -> bool:
        """Whether one text above the table can replace the column."""
        first = self.cells[0]
        if len(self.cells) < MANY or first.is_figure or first.badge:
            return False
        return all(cell == first for cell in self.cells)

    @property
    def classes(self) -> str | None:
        """Class of the cells: those of numbers are aligned to the right."""
        is_number = any(cell.value is not None for cell in self.cells)
        return "number" if is_number else None


def _cell(column: _Column, index: int) -> Markup:
    """Returns a cell; a phone shows the name of the column beside it."""
    cell = column.cells[index]
    classes = [
        name
        for name, applies in (
            (column.classes or "", True),
            ("figure", cell.is_figure),
            ("long", len(cell.text) > LONG),
            ("missing", not cell.text),
        )
        if applies and name
    ]
    text: str = cell.text or MISSING
    if cell.badge:
        text = element("span", text, class_=f"badge {cell.badge}")
    return element(
        "td",
        text,
        class_=" ".join(classes) or None,
        data_head=column.head,
        data_value=None if cell.value is None else repr(cell.value),
    )
