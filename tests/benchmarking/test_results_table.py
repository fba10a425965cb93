"""The README's table of measured results comes from the files."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import results
from mlx_marlin.measure import result_file
from mlx_marlin.measure.rows import OURS, STOCK
from mlx_marlin.planning.device import PARAVIRTUAL
from mlx_marlin.planning.problem import problem_of
from support.benchmark_rows import FACTS, mac_file, row


def test_the_readme_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert results.main(["--check"]) == 0
    assert capsys.readouterr().out == "up to date\n"


def test_every_kept_file_is_a_measured_one() -> None:
    results.read_all(results.FOLDER)


def test_times_of_a_paravirtual_device_are_in_no_table(tmp_path: Path) -> None:
    virtual = replace(mac_file(), machine=replace(FACTS, chip=PARAVIRTUAL))
    result_file.write(tmp_path / "virtual.json", virtual)

    with pytest.raises(ValueError, match=r"virtual\.json has times of a paravirtual"):
        results.read_all(tmp_path)


def test_without_files_the_readme_says_that_nothing_was_measured() -> None:
    said = results.section([])

    assert "No result file from a Mac exists yet" in said
    assert "nothing has been measured" in said


def test_a_table_has_a_line_for_each_machine_and_weight() -> None:
    other = replace(mac_file(), machine=replace(FACTS, chip="Apple M1", cores=8))
    other.products.append(row(problem_of(1, 64, 256, mode="mxfp4"), OURS, 0.003))

    lines = results.section([mac_file(), other]).splitlines()

    table = [line for line in lines if line.startswith("| Apple")]
    assert len(table) == 3
    assert table[0] == (
        "| Apple M3 Max, 40 | 2026-11-24 | 0.32.4 | 4096→14336, affine 4-bit g64 "
        "float16 |  |  | 125 / 250 |  |  |  |  |"
    )
    assert table[1].startswith("| Apple M1, 8 | ")
    assert table[2].count("|") == table[0].count("|")
    # Ours without stock's time is no comparison.
    assert " / " not in table[2]


def test_the_chain_and_the_usual_layout_are_what_counts() -> None:
    product = problem_of(8, 14336, 4096)
    result = replace(
        mac_file(),
        products=[
            row(product, OURS, 0.001, "independent"),
            row(product, STOCK, 0.001, "independent"),
            row(replace(product, layout="marlin"), OURS, 0.002),
            row(product, OURS, 0.125),
            row(product, STOCK, 0.25),
        ],
    )

    assert "| 125 / 250 |" in results.section([result])
    assert "1 / 1" not in results.section([result])


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a repository with a README and no results."""
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")
    monkeypatch.setattr(results, "README", readme)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    return tmp_path


def test_the_script_replaces_the_section_alone(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result_file.write(repository / "a.json", mac_file())

    assert results.main(["--check"]) == 1
    assert "run python -m benchmarks.results" in capsys.readouterr().out
    assert "old" in results.README.read_text()
    assert results.main([]) == 0

    text = results.README.read_text()
    assert text.startswith(f"before\n{results.BEGIN}\n")
    assert text.endswith(f"{results.END}\nafter\n")
    assert "Apple M3 Max" in text
    assert "old" not in text
    assert results.main(["--check"]) == 0


def test_predicted_files_are_refused(repository: Path) -> None:
    guess = replace(
        mac_file().products[0],
        timing=replace(mac_file().products[0].timing, method="cost model"),
    )
    result_file.write(repository / "a.json", replace(mac_file(), products=[guess]))

    with pytest.raises(ValueError, match=r"a\.json has predicted times"):
        results.main([])


@pytest.mark.parametrize(
    "text",
    [
        "",
        results.BEGIN,
        results.END + results.BEGIN,
        2 * (results.BEGIN + results.END),
    ],
)
def test_missing_and_repeated_markers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="in this order"):
        results.replaced(text, "table")
