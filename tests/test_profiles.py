"""Profiles run samples of grids, which have the values of as many parameters as fit."""

from itertools import product

import pytest
from hypothesis import strategies as st

from support import profiles
from support.profiles import representatives

pytest_plugins = ["pytester"]

CASES = [
    {"m": m, "dtype": dtype, "layout": layout}
    for dtype, layout, m in product(("float16", "float32"), ("mlx", "marlin"), "12345")
]
FILE = """
import pytest
from support.profiles import sampled

@sampled(4)
@pytest.mark.parametrize("m", range(3))
@pytest.mark.parametrize("n", range(3))
def test_grid(m, n): pass

@sampled(1)
@pytest.mark.parametrize("m", range(5))
def test_values(m): pass

@sampled(1)
@pytest.mark.parametrize("m", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_slow_values(m): pass

@pytest.mark.slow
def test_slow(): pass

def test_alone(): pass
"""


@pytest.mark.parametrize("number", [5, 7, 99])
def test_representatives_have_every_value_of_every_parameter(number: int) -> None:
    chosen = representatives(CASES, number)

    assert len(chosen) == min(number, len(CASES))
    for name in ("m", "dtype", "layout"):
        values = {case[name] for case in CASES}
        assert {CASES[i][name] for i in chosen} == values


def test_representatives_are_completed_up_to_a_number() -> None:
    cases = [{"m": str(m), "n": str(m * m % 7)} for m in range(30)]

    assert len(representatives(cases, 5, most=99)) == 30
    assert len(representatives(cases, 5, most=12)) == 12
    assert len(representatives(cases[:5] * 9, 2, most=9)) == 5


def test_rare_values_are_chosen_first() -> None:
    modes = [*["affine"] * 9, "mxfp4", "nvfp4"]
    cases = [{"mode": mode, "bits": str(i % 3)} for i, mode in enumerate(modes)]

    assert {cases[i]["mode"] for i in representatives(cases, 3)} == {*modes}


def test_profiles_run_more_and_more(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = pytester.getitems(FILE)

    for name, runs in (
        ("quick", 4 + 1 + 1 + 1),
        ("full", 6 + 3 + 3 + 2),
        ("every", 19),
    ):
        monkeypatch.setattr(profiles, "profile", lambda name=name: name)
        assert len({*items} - profiles.left_out(items)) == runs


@pytest.mark.parametrize(("profile", "examples"), [("quick", 3), ("full", 4)])
def test_a_test_draws_the_examples_of_the_profile(
    monkeypatch: pytest.MonkeyPatch, profile: str, examples: int
) -> None:
    monkeypatch.setattr(profiles, "profile", lambda: profile)
    seen = []

    @profiles.drawn(3, number=st.integers())
    def test(number: int) -> None:
        seen.append(number)

    test()

    assert len(seen) == examples
