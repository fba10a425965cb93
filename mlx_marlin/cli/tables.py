"""Tables of results, for the terminal and for the page of `mlx-marlin render`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from mlx_marlin.planning.choice import aligned

MANY = 4
"""Rows from which a column with one text is left out of a table."""
SOURCES = ("measured", "predicted", "assumed")
SOURCE = "times"
"""Name of the column that says where the times of a row come from."""
FIGURES = {
    *("ms", "TFLOPS", "compute %", "GB/s", "memory %", "% of roof", "range, ms"),
    *("x stock", "ms to first token", "ms a step", "prompt tokens/s"),
    *("generated tokens/s", "cold, ms", "warm, ms"),
}
"""Columns that depend on a time; the page shows whether it is measured."""
KEPT = {*FIGURES, SOURCE, "status", "bottleneck"}
"""Columns that no line above a table replaces."""

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


def columns(table: Table) -> tuple[list[str], str]:
    """Returns the columns to show of a table with rows, and a line above them.

    Columns without any text are left out. Those with the same text in many rows are in
    the line, which else is "".
    """
    kept, same = [], []
    for head in table.rows[0]:
        found = {row[head] for row in table.rows}
        if found <= {None, ""}:
            continue
        if len(found) == 1 and len(table.rows) >= MANY and head not in KEPT:
            same.append(f"{head}: {text(*found)}")
        else:
            kept.append(head)
    return kept, f"In all rows: {'; '.join(same)}." if same else ""


def printed(table: Table) -> str:
    """Returns a table for the terminal, without the plans; "" without rows."""
    rows = [{k: v for k, v in row.items() if k != "plan"} for row in table.rows]
    if not rows:
        return ""
    heads, same = columns(Table(title=table.title, rows=rows))
    cells = [[text(row[head]) for head in heads] for row in rows]
    return "\n".join(filter(None, [table.title, same, aligned([heads, *cells])]))


def text(value: Value) -> str:
    """Returns a value as it is shown: numbers have at least four digits."""
    if not is_number(value):
        return str(value or "")
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def is_number(value: Value) -> TypeGuard[float]:
    """Returns whether a value is a number, not a text."""
    return isinstance(value, int | float)
