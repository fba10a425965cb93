"""Finds times in a command's output that do not say that they are no measurements."""

import re

TIME = re.compile(r"(?<![\w.])\d[\d.,]*\s?(us|µs|ns|ms|s|seconds?|tokens/s|tok/s)\b")
"""A number with a unit of time or of tokens; a stated bandwidth is no time."""
UNIT = re.compile(r"(?<!\w)(us|ms)(?!\w)")
MARK = re.compile(r"predicted|cost model|model, not measured|by the model")
HEAD = re.compile(r"\stimes\s.*\bms\b")
"""The head of a table with a column of marks."""


def unmarked_times(text: str) -> list[str]:
    """Returns the lines that have a time without a mark, or the unit in a table's head.

    In a table with a column of marks, that is each row without one. A line with no
    number from that column on continues the head or a row.
    """
    found, marks = [], None
    for line in text.splitlines():
        head = HEAD.search(line)
        marks = head.start() if head else marks if line else None
        other = UNIT.search(line) if marks is None else re.search(r"\d", line[marks:])
        if (TIME.search(line) or other) and not (head or MARK.search(line)):
            found.append(line)
    return found
