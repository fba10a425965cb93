"""Tables: the one printer of those of a terminal, and what a page shows too."""

import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import TypeGuard

from mlx_marlin.regular_files import quoted

PIPED = 120
"""Width of the lines of a file or a pipe."""
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
KEPT = {*FIGURES, SOURCE, "status", "bottleneck", "verdict", "served by", "error"}
"""Columns that no line above a table replaces."""
EXTRA = (
    *("low occupancy", "simdgroups", "FLOP/byte", "compute %", "memory %"),
    *("method", "drift, %", "samples", "range, ms", "TFLOPS", "GB/s"),
)
"""Columns that a narrow terminal does without, the first one first."""
NUMBER = re.compile(r"[\d,]+(\.\d*)?(e[-+]\d+)?|nan|inf")
TIME = re.compile(r"([\d.]+ )?(us|ms|tokens/s)\b")
"""How cells begin that say what a time, or a column of times, is. They stay whole."""
MARKED = r"[\d.]+ (?:us|ms|tokens/s) \(?(?:measured|predicted|assumed|tuned)\S*"
"""A time and its mark, which no line divides."""
WORDS = re.compile(rf"{MARKED}|\S+")
PARTS = re.compile(rf"{MARKED}|\S+?(?:[.,:_/-](?=[A-Za-z*\[])|(?=\s|$))|\s+")
"""What a text is divided into where its words are too long: a path at its dots."""
LONG = 1 / 3
"""Share of a line from which a word is divided as soon as spaces are too few."""
INDENT = "  "
UNBROKEN = "\N{NO-BREAK SPACE}"

Value = str | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; all rows have the same columns, in which None and "" are missing."""

    title: str
    rows: Sequence[Mapping[str, Value]]
    once: Collection[str] = ()  # columns that are shown where one of them changes
    usual: Collection[str] = ()  # columns whose usual text stands above the table

    @property
    def sources(self) -> set[str]:
        """Where its times come from."""
        return {str(row[SOURCE]) for row in self.rows if SOURCE in row}


def source(text: str) -> str:
    """Returns a word for where a time comes from; others raise a ValueError."""
    if text not in SOURCES:
        raise ValueError(f"a time is {quoted(text, 60)}, expected one of {SOURCES}")
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
    """Returns a table for the terminal; "" without rows."""
    if not table.rows:
        return ""
    rows = [dict(row) for row in table.rows]
    heads, same = columns(table)
    notes = [same, *(_without_usual(rows, h) for h in heads if h in table.usual)]
    notes.append(_without_extra(rows, heads))
    once = [i for i, head in enumerate(heads) if head in table.once]
    cells = [[text(row[head]) for head in heads] for row in rows]
    for above, row in reversed([*pairwise(cells)]):
        if all(above[i] == row[i] for i in once):
            row[:] = ["" if i in once else cell for i, cell in enumerate(row)]
    above = [line for note in notes for line in _wrapped(note, width())]
    return "\n".join(filter(None, [table.title, *above, aligned([heads, *cells])]))


def _without_usual(rows: Sequence[dict[str, Value]], head: str) -> str:
    """Takes a text that most rows have out of them, and returns a line with it."""
    ((usual, count),) = Counter(row[head] for row in rows).most_common(1)
    if count < MANY or 2 * count <= len(rows):
        return ""
    for row in rows:
        row[head] = "" if row[head] == usual else row[head]
    return f"{head.capitalize()}, where none is given: {usual}."


def _without_extra(rows: Sequence[Mapping[str, Value]], heads: list[str]) -> str:
    """Takes heads away until the table fits, and returns a line that names them."""
    left = []
    for extra in filter(heads.__contains__, EXTRA):
        cells = [[head, *(text(row[head]) for row in rows)] for head in heads]
        if _fits(_fitting(cells, [_words])):
            break
        heads.remove(extra)
        left.append(extra)
    return f"Too wide for this terminal: {'; '.join(left)}." if left else ""


def text(value: Value) -> str:
    """Returns a value as it is shown: numbers have at least four digits."""
    if not is_number(value):
        return str(value or "")
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def is_number(value: Value) -> TypeGuard[float]:
    """Returns whether a value is a number, not a text."""
    return isinstance(value, int | float)


def width() -> int:
    """Returns the characters of a line: those of the terminal, if there is one."""
    return max(shutil.get_terminal_size((PIPED, 0)).columns, 1)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as text: words are left-aligned, numbers right-aligned.

    No line is wider than the terminal. Heads are divided first, then other cells, then
    words; a table that is too wide all the same is a paragraph for each row.
    """
    columns = list(zip(*rows, strict=True))
    widths = _fitting(columns)
    if not _fits(widths):
        return "\n".join(_paragraph(rows[0], row) for row in rows[1:])
    numeric = [all(_shows_number(cell) for cell in column[1:]) for column in columns]
    return "\n".join(
        INDENT.join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
        for line in zip_longest(*map(_divided, row, widths), fillvalue="")
    )


def _paragraph(heads: Sequence[str], row: Sequence[str]) -> str:
    """Returns a row as lines that name its columns; the first cell begins them."""
    cells = [*zip(heads, row, strict=True)][1:]
    named = [f"{head} {cell}".strip() for head, cell in cells if cell]
    told = "; ".join(filter(None, [row[0], *named]))
    return "\n".join(_wrapped(told, width(), INDENT))


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Returns the lines of a text; those behind the first one are indented."""
    whole = re.sub(MARKED, lambda found: found[0].replace(" ", UNBROKEN), text)
    lines = textwrap.wrap(
        whole, width, subsequent_indent=indent, break_on_hyphens=False
    )
    return [line.replace(UNBROKEN, " ") for line in lines]


def _words(cell: str) -> list[str]:
    """Returns what of a cell stays whole: a time with its mark, and words."""
    if TIME.match(cell):
        return [cell]
    words = WORDS.findall(cell)
    found = (PARTS.findall(w) if len(w) > LONG * width() else [w] for w in words)
    return [part for parts in found for part in parts]


DIVISIONS: tuple[Callable[[str], list[str]], ...] = (_words, PARTS.findall)
"""What cells are divided into, as far as they have to be."""


def _fitting(
    columns: Sequence[Sequence[str]],
    divisions: Sequence[Callable[[str], list[str]]] = DIVISIONS,
) -> list[int]:
    """Returns the width of each column, which are as narrow as they have to be."""
    widths = [max(map(len, column)) for column in columns]
    heads = [_longest(_words(cell) for cell in column[:1]) for column in columns]
    bodies = [max(map(len, column[1:]), default=0) for column in columns]
    _shrink(widths, [*map(max, heads, bodies)])
    for parts in divisions:
        _shrink(widths, [_longest(map(parts, column)) for column in columns])
    return widths


def _fits(widths: Sequence[int]) -> bool:
    return sum(widths) + len(INDENT) * (len(widths) - 1) <= width()


def _shrink(widths: list[int], least: Sequence[int]) -> None:
    """Takes from the widest columns what the table is too wide, if they can shrink."""
    for _ in range(sum(widths) + len(INDENT) * (len(widths) - 1) - width()):
        wider = [i for i, width in enumerate(widths) if width > least[i]]
        if wider:
            widths[max(wider, key=widths.__getitem__)] -= 1


def _longest(cells: Iterable[Sequence[str]]) -> int:
    return max((len(part.rstrip()) for cell in cells for part in cell), default=0)


def _divided(cell: str, width: int) -> list[str]:
    """Returns the lines of a cell: divided at spaces, and in words that are longer."""
    if len(cell) <= width:
        return [cell]
    if all(len(word) <= width for word in WORDS.findall(cell)):
        return _wrapped(cell, width)
    lines = [""]
    for part in PARTS.findall(cell):
        if len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part if lines[-1] or part.strip() else ""
    return [line.rstrip() for line in lines]


def _shows_number(cell: str) -> bool:
    return not cell or NUMBER.fullmatch(cell) is not None
