"""`make test` and `make test-all` together run every case of a grid."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from support.grids import drawn, representatives

pytest_plugins = ["pytester"]

CASES = [
    {"m": m, "dtype": dtype, "layout": layout}
    for dtype, layout, m in product(("float16", "float32"), ("mlx", "marlin"), "12345")
]


@pytest.mark.parametrize("number", [5, 7, 20])
def test_representatives_have_every_value_of_every_parameter(number: int) -> None:
    chosen = representatives(CASES, number)

    assert len(chosen) == number
    for name in ("m", "dtype", "layout"):
        values = {case[name] for case in CASES}
        assert {CASES[i][name] for i in chosen} == values


def test_rare_values_are_chosen_first() -> None:
    modes = [*["affine"] * 9, "mxfp4", "nvfp4"]
    cases = [{"mode": mode, "bits": str(i % 3)} for i, mode in enumerate(modes)]

    chosen = representatives(cases, 3)

    assert {cases[i]["mode"] for i in chosen} == {*modes}


def test_all_cases_are_kept_where_there_are_no_more() -> None:
    assert representatives(CASES, 99) == {*range(len(CASES))}


def test_a_drawn_test_has_its_examples_and_its_other_arguments() -> None:
    seen = []

    @drawn(3, 10, number=st.integers())
    def test(number: int, fixture: str) -> None:
        seen.append((number, fixture))

    run: Any = test
    run(examples=3, fixture="given")
    assert len(seen) == 3
    run(examples=10, fixture="given")
    assert len(seen) == 13
    assert {fixture for _, fixture in seen} == {"given"}


def test_a_drawn_test_fails_by_the_example_that_breaks_it() -> None:
    @drawn(50, 50, number=st.integers(0, 100))
    def test(number: int) -> None:
        assert number < 10

    run: Any = test
    with pytest.raises(AssertionError) as caught:
        run(examples=50)
    assert "number=10," in "".join(caught.value.__notes__)


def test_what_a_grid_leaves_is_run_with_it(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import pytest\nfrom support import grids\n\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n    grids.mark(items)\n"
    )
    pytester.makepyfile(
        "import pytest\n\n"
        "@pytest.mark.thinned(2)\n"
        "@pytest.mark.parametrize('m', range(6))\n"
        "def test_thinned(m): pass\n\n"
        "def test_alone(): pass\n"
    )

    short = pytester.runpytest("-m", "not grid")
    rest = pytester.runpytest("-m", "grid")

    short.assert_outcomes(passed=3, deselected=4)
    rest.assert_outcomes(passed=4, deselected=3)


def test_the_document_lists_the_files_with_grids() -> None:
    tests = Path(__file__).parent
    page = (tests.parent / "docs" / "testing.md").read_text(encoding="utf-8")
    table = page.split("files `test_*.py` with such grids |")[1].split("\n\n")[0]
    listed = {
        f"{folder}/test_{name}.py"
        for folder, names in re.findall(r"^\| `(.+)` \| (.+) \|$", table, re.MULTILINE)
        for name in names.split(", ")
    }

    found = {
        file.relative_to(tests).as_posix()
        for file in tests.glob("*/**/test_*.py")
        if re.search(r"mark\.(thinned|grid)\b|@drawn\(", file.read_text("utf-8"))
    }

    assert listed == found
