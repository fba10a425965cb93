"""Tables of the page: columns of texts and numbers, and where they come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from mlx_marlin.cli.render.html import Markup, element

LONG = 18
"""Characters from which the text of a cell is broken into lines."""
MANY = 4
"""Rows from which a column with one text is left out of a table."""
MISSING = "\N{EN DASH}"
SOURCES = ("measured", "predicted", "assumed")
SOURCE = "times"
"""Name of the column that says where the times of a row come from."""
FIGURES = {
    *("ms", "TFLOPS", "compute %", "GB/s", "memory %", "% of roof", "range, ms"),
    *("x stock", "ms to first token", "ms a step", "prompt tokens/s"),
    *("generated tokens/s", "cold, ms", "warm, ms"),
}
"""Columns that depend on a time; the page shows whether it is measured."""
BADGES = {"IMPOSSIBLE": "failed", "timed out": "failed"} | {
    name: name for name in (*SOURCES, "passed", "failed")
}
"""Texts that are highlighted, and the class."""
BADGED = (SOURCE, "status", "bottleneck")
"""Columns in which they are."""

Value = str | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table.

    Attributes:
        title: Its heading.
        rows: The rows: values by the name of the column, of which all rows have the
            same; None and "" are missing.
    """

    title: str
    rows: Sequence[Mapping[str, Value]]

    @property
    def sources(self) -> set[str]:
        """Where its times come from."""
        return {str(row[SOURCE]) for row in self.rows if SOURCE in row}


def source(text: str) -> str:
    """Returns a word for where a time comes from.

    Raises:
        ValueError: If it is none.
    """
    if text not in SOURCES:
        raise ValueError(f"a time is {text!r:.60}, expected one of {SOURCES}")
    return text


def section(table: Table) -> Markup:
    """Returns a table with its heading; nothing without rows.

    Columns without any text are left out, and those with the same text in many rows are
    a line above the table, but for the times.
    """
    if not table.rows:
        return Markup("")
    kept, same = [], []
    for head in table.rows[0]:
        found = {row[head] for row in table.rows}
        if found <= {None, ""}:
            continue
        is_same = len(found) == 1 and len(table.rows) >= MANY
        if is_same and head not in FIGURES and head not in BADGED:
            same.append(f"{head}: {text(*found)}")
        else:
            kept.append(head)
    numbers = {head for head in kept if any(_is_number(r[head]) for r in table.rows)}
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
        parts.append(element("p", f"In all rows: {'; '.join(same)}.", class_="same"))
    drawn = element(
        "table", element("thead", element("tr", *heads)), element("tbody", *rows)
    )
    return element("section", *parts, element("div", drawn, class_="table"))


def text(value: Value) -> str:
    """Returns a value as it is shown: numbers have at least four digits."""
    if not _is_number(value):
        return str(value or "")
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _is_number(value: Value) -> TypeGuard[float]:
    return isinstance(value, int | float)


def _cell(head: str, value: Value, is_number: bool) -> Markup:
    """Returns a cell; a phone shows the name of the column beside it."""
    shown = text(value)
    badge = BADGES.get(shown) if head in BADGED else None
    classes = {
        "number": is_number,
        "figure": head in FIGURES,
        "long": len(shown) > LONG,
        "missing": not shown,
    }
    return element(
        "td",
        element("span", shown, class_=f"badge {badge}") if badge else shown or MISSING,
        class_=" ".join(name for name, applies in classes.items() if applies) or None,
        data_head=head,
        data_value=repr(value) if _is_number(value) else None,
    )
