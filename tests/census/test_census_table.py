"""What a census says is compared with our counts, and proposed for the chip table."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import calibrate, census_table
from benchmarks.apple_tools import ARCHITECTURES

METAL = "Apple metal version 32023.883"
Census = dict[str, Any]


def instance(registers: int, spilled: int, counted: int | None) -> Census:
    return {
        "kernel": "marlin_gemv",
        "template": "ROWS=1",
        "registers": counted,
        "instructions": None if counted is None else 500,
        "error": None,
        "compiled": {
            "applegpu_g16s": {
                "registers": registers,
                "spilled_bytes": spilled,
                "code_bytes": 2048,
            },
            "applegpu_g17s": {"error": "metal-tt ended with 1"},
        },
    }


def census(*instances: Census) -> Census:
    return {
        "schema": census_table.SCHEMA,
        "version": census_table.VERSION,
        "machine": {"metal": METAL},
        "self_check": {each: {"read": True} for each in ARCHITECTURES},
        "instances": [*instances],
    }


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "results.md"
    text = f"above\n{census_table.BEGIN}\nnothing\n{census_table.END}\nbelow\n"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(census_table, "DOCUMENT", path)
    return path


def written(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_the_document_has_a_place_for_the_table() -> None:
    text = census_table.DOCUMENT.read_text(encoding="utf-8")

    assert text.count(census_table.BEGIN) == text.count(census_table.END) == 1


def test_all_shards_make_one_table_and_proposals(
    document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [instance(60 + index, 0, 50) for index in range(8)]
    first = written(tmp_path / "a.json", census(*few))
    second = written(tmp_path / "b.json", census(instance(90, 144, None)))

    assert calibrate.main([str(first), str(second)]) == 0

    row = "| `gemv` | g16 | 9 | 60 to 90 | -17 to -10 | 1 | 2.0 | 4 to 4 |"
    text = document.read_text(encoding="utf-8")
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert row in text
    assert "Apple's compiler, 32023.883. 32-bit registers" in text
    said = capsys.readouterr().out
    assert row in said
    assert '"thread_registers": 90 (now 96)' in said
    assert f"{METAL}, applegpu_g16s, 9 instances, 1 spill" in said
    assert "marlin_gemv for g16: add +13.5 to our counts (+10 to +17)" in said


@pytest.mark.parametrize(
    ("registers", "counted", "proposed"),
    [(96, 96, []), (120, 120, ['"thread_registers": at least 120 (now 96)'])],
)
def test_a_limit_is_proposed_if_it_is_known_better(
    registers: int, counted: int, proposed: list[str], tmp_path: Path
) -> None:
    path = written(tmp_path / "a.json", census(instance(registers, 0, counted)))

    found = census_table.proposals(census_table.read([path]))

    assert len(found) == len(proposed)
    for text, part in zip(found, proposed, strict=True):
        assert part in text


def test_figures_that_were_not_read_have_no_part(tmp_path: Path) -> None:
    content = census(instance(60, 0, 50))
    content["self_check"]["applegpu_g16s"]["read"] = False

    with pytest.raises(ValueError, match="no figures that were read"):
        census_table.read([written(tmp_path / "a.json", content)])


def changed(*path: Any, value: object) -> Census:
    content = deepcopy(census(instance(60, 0, 50)))
    at: Any = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return content


FIGURES = ("instances", 0, "compiled", "applegpu_g16s")


@pytest.mark.parametrize(
    "content",
    [
        changed("version", value=2),
        changed("machine", value=[]),
        changed("machine", "metal", value=3),
        changed("self_check", value={}),
        changed("instances", value=7),
        changed("instances", value=[[]]),
        changed("instances", 0, "kernel", value=None),
        changed("instances", 0, "registers", value="50"),
        changed("instances", 0, "compiled", "sparc", value={"registers": 1}),
        changed(*FIGURES, "registers", value=True),
        changed(*FIGURES, "spilled_bytes", value=1.5),
        changed(*FIGURES, value=None),
    ],
)
def test_a_hostile_file_is_refused(
    content: object, document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = document.read_text(encoding="utf-8")
    path = written(tmp_path / "a.json", content)

    assert calibrate.main([str(path)]) == 2

    assert f"calibrate: {path} is no census: " in capsys.readouterr().err
    assert document.read_text(encoding="utf-8") == before


def test_files_of_two_compilers_are_refused(
    document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = written(tmp_path / "a.json", census(instance(60, 0, 50)))
    other = changed("machine", "metal", value="another")
    second = written(tmp_path / "b.json", other)

    assert calibrate.main([str(first), str(second)]) == 2
    assert f"{second} is of another, expected {METAL}" in capsys.readouterr().err
