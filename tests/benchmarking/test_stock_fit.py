"""The constants in use are those that `benchmarks/stock_fit.py` finds."""

from typing import Any

import pytest

from benchmarks import stock_fit
from benchmarks.stock import prediction
from mlx_marlin.backends.metal import main_loop

CONSTANTS = {constant.name: constant for constant in stock_fit.CONSTANTS}


def rows_of(constant: Any) -> list[Any]:
    return [row for row in stock_fit.FITTED if constant.rows(row)]


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_in_use_is_the_best_fit(name: str) -> None:
    constant = CONSTANTS[name]

    best = stock_fit.fitted(constant, rows_of(constant))

    assert constant.current == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_predicts_the_rows_that_it_was_not_fitted_to(name: str) -> None:
    constant = CONSTANTS[name]
    for of_part in constant.parts.values():
        part = [row for row in rows_of(constant) if of_part(row)]
        others = [row for row in rows_of(constant) if not of_part(row)]
        with stock_fit.using(constant, stock_fit.fitted(constant, others)):
            errors = [abs(row.error()) for row in part]

        assert part
        assert others
        assert max(errors) < 0.22


def test_fitting_leaves_the_constants_as_they_were() -> None:
    def constants() -> tuple[Any, ...]:
        factor = prediction.SLOWER_BYTES
        return main_loop.M5_MAX, main_loop.ULTRA_LANES, dict(main_loop.RATES), factor

    before = constants()
    for constant in CONSTANTS.values():
        stock_fit.fitted(constant, rows_of(constant)[:1])

    assert constants() == before


def test_the_report_names_every_constant_and_what_was_held_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert stock_fit.main() == 0

    printed = capsys.readouterr().out
    assert "nothing is measured here" in printed
    for constant in CONSTANTS.values():
        assert f"{constant.name}: in use {constant.current:g}, best fit" in printed
        assert all(f"fitted without {part}" in printed for part in constant.parts)
    assert "M4 Max, 40, 25 x 27B forward" in printed
