"""The tables of docs/speculation.md are the cost model's, and its formula is right."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import speculation
from benchmarks.document_table import DocumentTable
from benchmarks.speculation import Pays, best, expected_tokens, speedup
from mlx_marlin.backends.metal.device import chips

RATES = st.floats(0, 1)


def test_the_document_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    # After an intended change: python -m benchmarks.speculation
    assert speculation.main(["--check"]) == 0
    assert capsys.readouterr().out == "up to date\n"


def test_a_changed_time_shows_in_the_document() -> None:
    text = speculation.DOCUMENT.read_text(encoding="utf-8")
    table = speculation.tables()
    changed = table.replace("| M3 Max | 12", "| M3 Max | 13")

    assert changed != table
    assert speculation.TABLE.replaced(text, changed) != text


def test_every_chip_has_its_lines() -> None:
    rows, lengths = speculation.tables().split("\n\n")

    names = [device.name.removeprefix("Apple ") for device in speculation.devices()]
    assert len(names) == len(chips())
    for name in names:
        cells = f"| {name} |", f"| {name}* |"
        assert sum(line.startswith(cells) for line in rows.splitlines()) == 1
        assert sum(line.startswith(cells) for line in lengths.splitlines()) == 3


def test_the_document_says_what_8_and_12_rows_cost() -> None:
    """If a number here changes, so do the sentences after the formula."""
    rows, _ = speculation.tables().split("\n\n")
    head, _, *lines = ([*map(str.strip, line.split("|"))] for line in rows.split("\n"))
    eight, twelve = {}, {}
    for cells in lines:
        name, ours = cells[1].rstrip("*"), {}
        for count, times in zip(head[2:-1], cells[2:-1], strict=True):
            ours[count] = float(times.split(" / ")[1])
        eight[name] = round(ours["8"] / ours["1"], 2)
        twelve[name] = round(ours["12"] / ours["8"], 1)
    m1 = [eight.pop(f"M1 {size}") for size in ("Pro", "Max", "Ultra")]
    m5 = {twelve.pop(name) for name in [*twelve] if name.startswith("M5")}

    assert eight.pop("M5 Max") == 1.23
    assert (min(m1), max(m1), max(eight.values())) == (1.31, 1.35, 1.12)
    assert (min(twelve.values()), max(twelve.values()), m5) == (1.4, 1.9, {1.2, 1.3})
    text = " ".join(speculation.DOCUMENT.read_text(encoding="utf-8").split())
    assert "at most 1.12 times as long as one, except on M5 Max (1.23)" in text
    assert "on M1 Pro, M1 Max and M1 Ultra (1.31 to 1.35)" in text
    assert (
        "1.4 to 1.9 times as long as 8 on M1 to M4, and 1.2 or 1.3 times on M5" in text
    )


@given(rate=RATES, length=st.integers(0, 8))
def test_expected_tokens_are_the_mean_over_all_outcomes(
    rate: float, length: int
) -> None:
    mean = 0.0
    for outcome in product([True, False], repeat=length):
        chance = 1.0
        for accepted in outcome:
            chance *= rate if accepted else 1 - rate
        taken = outcome.index(False) if False in outcome else length
        mean += chance * (taken + 1)

    assert expected_tokens(rate, length) == pytest.approx(mean)


@given(
    rate=RATES,
    seconds=st.lists(st.floats(0.1, 9), min_size=3, max_size=10),
    draft=st.floats(0.01, 2),
)
def test_no_length_is_faster_than_the_best_one(
    rate: float, seconds: list[float], draft: float
) -> None:
    found = best(rate, seconds, draft)

    assert found.speedup >= 1
    if found.length:
        assert found.speedup == speedup(rate, found.length, seconds, draft)
    for length in range(1, len(seconds) - 1):
        assert found.speedup >= speedup(rate, length, seconds, draft)


def test_drafts_pay_where_rows_are_free_and_do_not_where_they_cost_a_pass() -> None:
    free = best(0.9, [1.0] * 6, 0.0)
    dear = best(0.5, [1.0, *map(float, range(1, 6))], 0.1)

    assert free.length == 4
    assert free.speedup == pytest.approx(1 + 0.9 + 0.81 + 0.729 + 0.6561)
    assert dear == Pays(0, 1.0)


def test_a_table_has_as_many_cells_in_each_line() -> None:
    for table in speculation.tables().split("\n\n"):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_the_markers_name_the_command() -> None:
    table = DocumentTable("title", "benchmarks.name")

    text = f"a\n{table.begin}\nold\n{table.end}\nb\n"

    assert "python -m benchmarks.name" in table.begin
    assert table.replaced(text, "new") == text.replace("old", "new")
