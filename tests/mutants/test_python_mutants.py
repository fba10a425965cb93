"""Recorded mutants of the package's Python are noticed by the tests that once did."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from mutants.python import recorded
from mutants.python.changed_import import alone
from mutants.python.recorded import Recorded

pytestmark = pytest.mark.mutant
ROOMS = sorted({row.room for row in recorded.read()})


@pytest.mark.parametrize("room", ROOMS)  # as one test they take longer than one may
def test_recorded_mutants_of_python_are_noticed(room: str) -> None:
    rows = [row for row in recorded.read() if row.room == room]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        assert [row for row in threads.map(_missed, rows) if row] == []


def _missed(row: Recorded) -> str:
    """Returns a mutant that passes its test, or that has no place or test any more."""
    try:
        return "" if alone(row.mutant(), [row.test]) else f"{row} is not noticed"
    except ValueError as error:
        return str(error)


def test_the_unchanged_code_passes_the_tests_that_notice() -> None:
    rows = recorded.read()
    row = rows[0]
    unchanged = Recorded(row.room, row.file, row.old, row.old, row.test).mutant()
    assert alone(unchanged, [row.test for row in rows]) == ""
