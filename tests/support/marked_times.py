"""Finds times in a command's output that do not say that they are no measurements."""

import re

TIME = re.compile(
    r"(?<![\w.])\d[\d.,]*\s?(us|µs|ns|ms|s|seconds?|tokens/s|tok/s)\b"
    r"|(?<!\w)(us|ms)(?!\w)"
)
"""A number with a unit of time or of tokens, or the unit in the head of a table. A chip
has a stated bandwidth, which is no measurement."""
MARK = re.compile(r"predicted|emulator counters|model, not measured|by the model")


def unmarked_times(text: str) -> list[str]:
    """Returns the lines that have a time without a mark."""
    return [
        line
        for line in text.splitlines()
        if TIME.search(line) and not MARK.search(line)
    ]
