"""Calibration recovers the constants that made a file, and says what it cannot."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import exp
from pathlib import Path
from typing import Any

import pytest

from benchmarks import calibrate, rates_fit
from benchmarks.rates_fit import Constants
from benchmarks.stock import prediction
from mlx_marlin.backends import planner
from mlx_marlin.backends.metal import main_loop
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.measure import result_file
from mlx_marlin.measure.result_file import ResultFile
from mlx_marlin.measure.rows import OURS, STOCK, ProductRow, Timing
from mlx_marlin.planning.device import PARAVIRTUAL
from mlx_marlin.planning.problem import problem_of
from support.benchmark_rows import FACTS, M3_MAX, mac_file, row

TRUE = Constants(
    replace(main_loop.APPLE9, matrix_slots=17.5, bandwidth=0.8, scattered=0.8),
    overlap=0.9,
    overhead=3.1e-6,
)
SHAPES = ((14336, 4096), (2048, 1024))
"""n and k; what a chain adds is a part of small products alone."""
FORMATS: tuple[dict[str, Any], ...] = (
    {},
    {"bits": 8},
    {"mode": "mxfp4"},
    {"bits": 3, "group_size": 32},
    {"layout": "marlin", "dtype": "bfloat16"},
)
ROWS = (1, 4, 8, 16, 32, 64)


def made_rows(
    true: Constants,
    device: Device = M3_MAX,
    rows: Sequence[int] = ROWS,
    noise: float = 0,
) -> list[ProductRow]:
    """Returns the rows that the model with some constants would have measured."""
    draw = random.Random(0)
    found = []
    for m, (n, k), format in product(rows, SHAPES, FORMATS):
        problem = problem_of(m, n, k, **format)
        for arm, plan in ((OURS, planner.choose(problem, device)), (STOCK, None)):
            made = ProductRow(
                problem=problem,
                arm=arm,
                clock="chain",
                timing=Timing(seconds=1.0, method="wall time"),
                plan=plan,
            )
            with rates_fit.assumed(true, device):
                seconds = rates_fit.predicted(made, device) + true.overhead
            seconds *= exp(draw.gauss(0, noise))
            found.append(replace(made, timing=replace(made.timing, seconds=seconds)))
    return found


def largest_error(
    found: rates_fit.Fit, rows: Sequence[ProductRow], device: Device
) -> float:
    overhead = found.constants.overhead
    with rates_fit.assumed(found.constants, device):
        predicted = [rates_fit.predicted(row, device) + overhead for row in rows]
    return max(
        abs(seconds / row.timing.seconds - 1)
        for row, seconds in zip(rows, predicted, strict=True)
    )


@pytest.mark.parametrize(
    "chip", ["Apple M3 Max", pytest.param("Apple M1", marks=pytest.mark.slow)]
)
def test_known_constants_are_recovered(chip: str) -> None:
    device = Device.named(chip)
    rows = made_rows(TRUE, device)

    found = rates_fit.fit(rows, device)

    assert {*found.determined} == {*rates_fit.NAMES}
    for name, value in found.constants.values().items():
        assert value == pytest.approx(TRUE.values()[name], rel=0.05), name
    assert largest_error(found, rows, device) < 0.003


@pytest.mark.slow
def test_noise_moves_constants_by_as_much_as_their_errors_say() -> None:
    found = rates_fit.fit(made_rows(TRUE, noise=0.03), M3_MAX)

    for name in ("bandwidth", "overhead", "matrix_slots"):
        value, error = found.constants.values()[name], found.errors[name]
        assert 0 < error < 0.5
        assert abs(value / TRUE.values()[name] - 1) < 4 * error


def test_what_no_row_depends_on_is_not_determined() -> None:
    rows = [row for row in made_rows(TRUE, rows=(1, 2)) if row.arm == STOCK]
    before = rates_fit.present(M3_MAX)

    found = rates_fit.fit(rows, M3_MAX)

    assert {*found.determined} == {"bandwidth", "overhead"}
    values = found.constants.values()
    assert values["bandwidth"] == pytest.approx(TRUE.rates.bandwidth, rel=0.01)
    for name in ("matrix_slots", "scattered", "overlap"):
        assert values[name] == pytest.approx(before.values()[name])
    said = calibrate.changes(found, before)
    undetermined = len(rates_fit.NAMES) - len(found.determined)
    assert said.count("not determined by this file alone") == undetermined


def test_the_models_constants_are_what_they_were_afterwards() -> None:
    problem = problem_of(8, 4096, 4096)
    before = rates_fit.present(M3_MAX), dict(main_loop.RATES), dict(prediction.OVERLAP)
    plan = planner.choose(problem, M3_MAX)
    seconds = planner.predict(plan, M3_MAX).seconds

    with rates_fit.assumed(TRUE, M3_MAX):
        assert planner.predict(plan, M3_MAX).seconds != seconds
    with pytest.raises(KeyError), rates_fit.assumed(TRUE, M3_MAX):
        raise KeyError

    assert planner.predict(plan, M3_MAX).seconds == seconds
    after = rates_fit.present(M3_MAX), dict(main_loop.RATES), dict(prediction.OVERLAP)
    assert after == before


def test_plans_that_change_are_listed() -> None:
    same = rates_fit.Fit(rates_fit.present(M3_MAX), {})
    slow = replace(
        same.constants, rates=replace(same.constants.rates, matrix_slots=60.0)
    )
    problems = [problem_of(m, 4096, 14336) for m in (1, 8, 32)]

    assert calibrate.changed_plans(problems, M3_MAX, same) == []
    (line,) = calibrate.changed_plans(
        [problem_of(8, 14336, 4096)], M3_MAX, rates_fit.Fit(slow, {})
    )
    assert line.endswith("our kernels -> stock MLX")


def test_the_command_prints_what_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    rows = made_rows(TRUE, rows=(1, 8, 64))
    result_file.write(path, ResultFile(machine=FACTS, date="2026-11-24", products=rows))

    assert calibrate.main([str(path)]) == 0

    said = capsys.readouterr().out
    assert "Apple M3 Max 40-core GPU, 60 measured rows" in said
    for name in rates_fit.NAMES:
        assert name in said
    assert said.count("us (measured)") == len(rows)
    assert "median error: " in said
    assert "products change, by the model:" in said


def test_stagings_and_independent_launches_are_not_used() -> None:
    rows = made_rows(TRUE, rows=(1, 8))
    plan = planner.make(
        problem_of(8, 4096, 4096), device=M3_MAX, kernel="gemm_staged", buffers=2
    )
    others = [
        replace(rows[0], clock="independent"),
        replace(rows[0], plan=plan),
        replace(rows[0], plan=None),
    ]

    assert rates_fit.rows_of(replace(mac_file(), products=[*rows, *others])) == rows


GUESS = Timing(seconds=1e-3, method="cost model")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (replace(mac_file(), machine=replace(FACTS, chip="H200")), "not an Apple chip"),
        (
            replace(mac_file(), machine=replace(FACTS, chip=PARAVIRTUAL)),
            "not an Apple chip",
        ),
        (replace(mac_file(), products=[]), "expected at least 8"),
        (
            ResultFile(
                machine=replace(FACTS, chip="emulator for unknown"),
                date="2026-11-24",
                products=[replace(row(problem_of(1, 64, 256), STOCK, 1), timing=GUESS)],
            ),
            "are predicted",
        ),
    ],
)
def test_a_file_that_cannot_calibrate_is_refused(
    result: ResultFile, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    result_file.write(path, result)

    assert calibrate.main([str(path)]) == 2

    assert message in capsys.readouterr().err


def test_a_file_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text("{}")

    assert calibrate.main([str(tmp_path / "a.json")]) == 2
    assert "is not a result file" in capsys.readouterr().err
    assert calibrate.main([str(tmp_path / "none.json")]) == 2
