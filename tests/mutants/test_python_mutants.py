"""Recorded mutants of the package's Python are noticed by the test that once did."""

import pytest

from mutants.python import recorded, runner
from mutants.python.recorded import Recorded

pytestmark = pytest.mark.mutant

ROWS = recorded.read()


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{row.file}-{i}") for i, row in enumerate(ROWS)]
)
def test_a_mutant_of_python_is_noticed(row: Recorded) -> None:
    assert runner.alone(row.mutant(), [row.test]) != ""


def test_the_unchanged_code_passes_the_tests_that_notice() -> None:
    unchanged = recorded.read()[0].mutant()
    unchanged = Recorded("", unchanged.file, unchanged.old, unchanged.old, "").mutant()
    assert runner.alone(unchanged, [row.test for row in ROWS]) == ""
