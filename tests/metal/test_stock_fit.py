"""The constants in use are those that `benchmarks/stock_fit.py` finds."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from mlx_marlin.backends.metal.cost import rates
from mlx_marlin.backends.metal.stock import prediction

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FIT = runpy.run_path(str(BENCHMARKS / "stock_fit.py"))
CONSTANTS = {constant.name: constant for constant in FIT["CONSTANTS"]}


def rows_of(constant: Any) -> list[Any]:
    return [row for row in FIT["FITTED"] if constant.rows(row)]


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_in_use_is_the_best_fit(name: str) -> None:
    constant = CONSTANTS[name]

    best = FIT["fitted"](constant, rows_of(constant))

    assert constant.current == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_predicts_the_rows_that_it_was_not_fitted_to(name: str) -> None:
    constant = CONSTANTS[name]
    for of_part in constant.parts.values():
        part = [row for row in rows_of(constant) if of_part(row)]
        others = [row for row in rows_of(constant) if not of_part(row)]
        with FIT["using"](constant, FIT["fitted"](constant, others)):
            errors = [abs(row.error()) for row in part]

        assert part
        assert others
        assert max(errors) < 0.22


def test_fitting_leaves_the_constants_as_they_were() -> None:
    def constants() -> tuple[Any, ...]:
        factor = prediction.SLOWER_BYTES
        return rates.M5_MAX, rates.ULTRA_LANES, dict(rates.RATES), factor

    before = constants()
    for constant in CONSTANTS.values():
        FIT["fitted"](constant, rows_of(constant)[:1])

    assert constants() == before


def test_rows_out_of_sample_are_those_that_nothing_was_fitted_to() -> None:
    used = [row for constant in CONSTANTS.values() for row in rows_of(constant)]
    chains = [row for row in FIT["FITTED"] if row.series.clock == "chain"]
    apart = [row for row in chains if row not in used and not FIT["_sets_link"](row)]

    assert [row for row in chains if row.is_out] == apart
    assert len(apart) >= 19


def test_the_report_names_every_constant_and_what_was_held_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert FIT["main"]() == 0

    printed = capsys.readouterr().out
    assert "nothing is measured here" in printed
    for constant in CONSTANTS.values():
        assert f"{constant.name}: in use {constant.current:g}, best fit" in printed
        assert all(f"fitted without {part}" in printed for part in constant.parts)
    assert "M4 Max, 40, 25 x 27B forward" in printed


def test_the_plans_of_forty_products_are_listed() -> None:
    planned = runpy.run_path(str(BENCHMARKS / "planned.py"))

    lines = [*planned["lines"]("Apple M3 Max")]

    assert len(lines) == len(set(lines)) == 40
    assert all(line.startswith("M3 Max | ") for line in lines)
    assert lines[-1].split(" | ")[1] == "16 x 17408→5120"
