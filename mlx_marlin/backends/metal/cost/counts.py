"""Counted cost of an iteration of the main loop, by format.

The counts are those of an open compiler for the first Apple generation. They rank
variants; Apple's compiler may give others. An iteration is 64 k of 32 rows of w. The
data file is written by `python -m benchmarks.counts`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from mlx_marlin.planning.explicit import CodeForm
from mlx_marlin.weights.formats import format_of

LARGEST_GROUP = 64
"""Group size whose counts larger groups have."""


Counts = Sequence[Sequence[int]]
"""The fields of a `Count` for each number of rows or fragments, from 1 on."""


class Count(NamedTuple):
    """What an iteration takes."""

    slots: int  # Issue slots besides the matrix products
    registers: int  # 16-bit registers of a thread that are alive at once, at most
    allocated: int  # Those that the compiler took, which fills its classes


@dataclass(frozen=True, slots=True)
class LoopCost:
    """Counts of one format."""

    # Counts for 1 and 2 row fragments of x, by form of codes and dtype
    fragments: Mapping[str, Counts]
    # Counts of the dot products for 1 row and more, in the same way
    rows: Mapping[str, Counts]

    def of_fragments(self, fragments_m: int, operand: CodeForm, dtype: str) -> Count:
        """Returns the counts of the matrix products.

        A form that was not counted costs as much as the exact one, and a third fragment
        as much as the second.
        """
        return _nth(_of_form(self.fragments, operand, dtype), fragments_m)

    def of_rows(self, m: int, operand: CodeForm, dtype: str) -> Count:
        """Returns the counts of the dot products; further rows cost as the last
        does."""
        return _nth(_of_form(self.rows, operand, dtype), m)


def _nth(counts: Counts, nth: int) -> Count:
    """Returns a count, from 1 on; further ones grow as the last one does."""
    if nth <= len(counts):
        return Count(*counts[nth - 1])
    before, last = counts[-2:]
    more = nth - len(counts)
    return Count(*(b + more * (b - a) for a, b in zip(before, last, strict=True)))


def form_key(operand: CodeForm, dtype: str) -> str:
    """Returns the name of a form of codes and a dtype in the data file."""
    return f"{operand} {dtype}"


def format_key(codes: str, bits: int, group: int, layout: str) -> str:
    """Returns the name of a format in the data file."""
    return f"{codes} {bits} {group} {layout}"


@lru_cache
def loop_cost(mode: str, bits: int, group_size: int, layout: str) -> LoopCost:
    """Returns the counts of a format, or of the affine one if it was not counted."""
    group = min(group_size, LARGEST_GROUP)
    table = _counted()
    codes = format_of(mode, bits).codes
    found = table.get(format_key(codes, bits, group, layout))
    found = found or table[format_key("affine", bits, group, layout)]
    return LoopCost(found["fragments"], found["rows"])


def _of_form(counts: Mapping[str, Counts], operand: CodeForm, dtype: str) -> Counts:
    # Except for 4 bits, the cheapest offset is the least one.
    second: CodeForm = "offset" if operand == "least_offset" else "exact"
    found = counts.get(form_key(operand, dtype)) or counts.get(form_key(second, dtype))
    for other in ("exact", "offset"):
        found = found or counts.get(form_key(other, dtype))
    return found or counts[form_key("exact", "float32")]


@lru_cache(maxsize=1)
def _counted() -> dict[str, Any]:
    import json
    from pathlib import Path

    file = Path(__file__).parents[3] / "data" / "counts.json"
    table: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return table
