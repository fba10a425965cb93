"""The check that tests of commands use finds what it should."""

import pytest

from support.marked_times import unmarked_times


@pytest.mark.parametrize(
    "line",
    ["took 3.5 us", "12ms", "1.25 s", "ours 33.1 tokens/s", "  us  +-"],
)
def test_a_time_without_a_mark_is_found(line: str) -> None:
    assert unmarked_times(f"before\n{line}\nafter") == [line]


@pytest.mark.parametrize(
    "line",
    [
        "3.5 us predicted (cost model)",
        "us (cost model)  +-",
        "12 rows of 4096→4096, 4 buffers",
        "8 cores, 4-bit, 68.3 GB/s",
        "arm   times      ms   method\nours  predicted  0.1  cost model\n\nours",
    ],
)
def test_marked_times_and_other_numbers_are_not(line: str) -> None:
    assert unmarked_times(line) == []


def test_each_row_of_a_table_needs_a_mark() -> None:
    head = "arm   times      ms  range,\n                       ms\n"
    rows = "ours  predicted  0.1  0\ng64\nours  measured   0.2\nours             0.3"

    assert unmarked_times(head + rows) == rows.splitlines()[2:]
