"""Recorded mutants of the package's Python are noticed by the tests that once did."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from mutants.python import recorded
from mutants.python.changed_import import alone
from mutants.python.recorded import Recorded

pytestmark = pytest.mark.mutant
RATE = 0.9  # some lines may have changed since


def test_most_recorded_mutants_of_python_are_noticed() -> None:
    rows = recorded.read()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        missed = [row for row in threads.map(_missed, rows) if row]
    assert len(missed) <= (1 - RATE) * len(rows), "\n".join(missed)


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
