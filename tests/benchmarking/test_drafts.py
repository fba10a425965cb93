"""Drafts do not lose on machines that are simulated, and find the best length."""

from dataclasses import replace
from statistics import fmean

import pytest

from benchmarks.drafts import OF_BEST, OF_PLAIN, Case, Machine, simulated

CASES = {
    # Chosen by a race at a short context: drafts of 7, which are .9 of plain.
    "issue": Case(
        machine=Machine("8B", "M4 Pro", True), context="32k", chances=(".6",)
    ),
    "cliff": Case(machine=Machine("27B", "M1 Max", True), context="32k"),
    "tiles": Case(machine=Machine("8B", "M1 Max"), context="8k", chances=("code",)),
    "none": Case(
        machine=Machine("8B", "M5 Max", True),
        context="32k",
        chances=(".3",),
        seconds_of_token=1e-3,
    ),
    "worse": Case(machine=Machine("27B", "M3 Max"), chances=("code", ".3")),
    "better": Case(machine=Machine("27B", "M3 Max"), chances=(".3", ".95")),
    "throttled": Case(machine=Machine("8B", "M4 Pro"), throttled=1.6, tokens=700),
    "noisy": Case(machine=Machine("27B", "M4 Pro"), context="8k", noise=0.3),
    "assumed": Case(machine=Machine("8B", "M3 Max"), context="8k", knows_race=False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_best_length_is_found_and_nothing_is_lost(name: str) -> None:
    case = replace(CASES[name], tokens=max(CASES[name].tokens, 400))
    outcomes = [simulated(case, seed) for seed in range(3 if case.noise else 1)]
    assert min(each.of_plain for each in outcomes) >= OF_PLAIN
    for phases in zip(*(each.phases for each in outcomes), strict=True):
        assert fmean(each.rate / each.best for each in phases) >= OF_BEST, phases


def test_where_no_draft_pays_few_are_tried() -> None:
    case = CASES["none"]
    (phase,) = simulated(case).phases
    assert (phase.best, phase.length) == (1, 0)
    assert phase.rate > 0.985
