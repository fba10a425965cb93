"""Finds times in a command's output that do not say that they are no measurements."""

import re

TIME = re.compile(
    r"(?<![\w.])\d[\d.,]*\s?(us|µs|ns|ms|s|seconds?|tokens/s|tok/s)\b"
    r"|(?<!\w)(us|ms)(?!\w)"
)
"""A number with a unit of time or of tokens, or the unit in the head of a table. A chip
has a stated bandwidth, which is no measurement."""
MARK = re.compile(r"predicted|cost model|model, not measured|by the model")
HEAD = re.compile(r"\stimes\s.*\bms\b")
"""The head of a table with a column of marks."""


def unmarked_times(text: str) -> list[str]:
    """Returns the lines that have a time without a mark.

    In a table with a column of marks, that is each row without one.
    """
    found, is_table = [], False
    for line in text.splitlines():
        is_head = HEAD.search(line) is not None
        is_table = bool(line) and (is_head or is_table)
        has_time = TIME.search(line) is not None or is_table
        if has_time and not (is_head or MARK.search(line)):
            found.append(line)
    return found
