"""Tables fit the terminal and lose nothing."""

import os
import re
from collections import Counter
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.tables import PIPED, Table, aligned, printed, width

WORDS = st.lists(st.text("ab._", min_size=1, max_size=30), max_size=9).map(" ".join)
TIMES = st.floats(0, 1e9).map(lambda value: f"{value:.1f} us predicted")
CELLS = WORDS | TIMES | TIMES.map("ours: {}: a_b".format)
ROWS = st.lists(st.tuples(WORDS, CELLS, CELLS, CELLS).map(list), min_size=2)


def whole(cell: str) -> list[str]:
    return [cell] if " us " in cell else [*cell.split(), ""]


@given(ROWS, st.integers(10, 200))
def test_a_table_is_never_wider_than_the_terminal_and_loses_nothing(
    rows: list[list[str]], columns: int
) -> None:
    with patch.dict(os.environ, COLUMNS=str(columns)):
        text = aligned(rows)

    assert max(map(len, text.split("\n"))) <= columns
    body = Counter("".join(" ".join(row) for row in rows[1:]).replace(" ", ""))
    assert body <= Counter(text)
    for time in re.findall(r"\S+ us predicted", "\n".join(map(" ".join, rows[1:]))):
        assert time in text or len(time) + len("  ;") > columns
    longest = [
        max(len(w) for cell in each for w in whole(cell))
        for each in zip(*rows, strict=True)
    ]
    if sum(longest) + 6 <= columns and max(longest) <= columns / 3:
        assert sorted(text.split()) == sorted(" ".join(map(" ".join, rows)).split())


def test_a_pipe_has_lines_of_120_characters_and_a_terminal_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)
    assert width() == PIPED == 120
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((71, 9)))
    with open(os.devnull) as stream:
        monkeypatch.setattr("sys.__stdout__", stream)
        assert width() == 71


def test_what_rows_have_in_common_stands_above_them() -> None:
    rows = [
        {"name": "a" if index < 3 else "b", "bits": bits, "rows": index, "times": "x"}
        for index, bits in enumerate(["4", "4", "4", "8", "4"])
    ]

    said = printed(Table(title="Title", rows=rows, once=["name"], usual=["bits"]))

    lines = [line.split() for line in said.splitlines()]
    assert lines[:2] == [["Title"], ["Bits,", "where", "none", "is", "given:", "4."]]
    assert lines[2] == ["name", "bits", "rows", "times"]
    assert lines[3:] == [
        ["a", "0", "x"],
        ["1", "x"],
        ["2", "x"],
        ["b", "8", "3", "x"],
        ["4", "x"],
    ]
    same = printed(Table(title="", rows=[{**row, "bits": 4} for row in rows]))
    assert same.startswith("In all rows: bits: 4.\nname  rows  times\n")
