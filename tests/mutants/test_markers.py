"""Markers in the shaders and mutants belong to each other."""

import re
from pathlib import Path

import pytest

from mlx_marlin.backends import source
from mutants import markers
from mutants.catalogue import CUDA_MUTANTS, MUTANTS

TEXT = """
float total(float a, float b) {
  const float sum = a + b;  // mutant: sum
  return sum;  // a comment + b
}

float rest(float a, float b) {
  // mutant: rest
  const float rest = a - b;
  return rest;  // mutant: result
}
"""
LANGUAGE = frozenset(
    {"abs", "atomic_store_explicit", "mem_device", "mem_none", "simdgroup_barrier"}
    | {"vertex", "yx"}
)
"""Names that only mutants use and that no shader declares."""
PLANTED = [
    *((mutant, f"{mutant.file}.metal") for mutant in MUTANTS),
    *((mutant, mutant.file) for mutant in CUDA_MUTANTS),
]


def read(file: str) -> str:
    return (source.shader_folder() / file).read_text(encoding="ascii")


def shader_files() -> list[str]:
    folder = source.shader_folder()
    files = (each for each in folder.rglob("*") if each.is_file())
    return sorted(each.relative_to(folder).as_posix() for each in files)


@pytest.mark.parametrize("file", shader_files())
def test_every_marker_has_a_mutant_and_a_name_of_its_own(file: str) -> None:
    used = {mutant.marker for mutant, where in PLANTED if where == file}

    assert sorted(markers.marker_names(read(file))) == sorted(used)


@pytest.mark.parametrize("file", shader_files())
def test_every_mutant_changes_one_fragment(file: str) -> None:
    text = read(file)

    for mutant, where in PLANTED:
        if where == file:
            assert mutant.changed(text) != text


def test_every_mutant_names_a_file_of_the_shaders() -> None:
    assert {file for _, file in PLANTED} <= {*shader_files()}


def test_mutants_use_only_names_that_the_shaders_have() -> None:
    word = re.compile(r"(?<!\w)[A-Za-z_]\w*")
    texts = (re.sub("//.*", "", read(file)) for file in shader_files())
    known = {*LANGUAGE}.union(*(word.findall(text) for text in texts))
    for mutant, _ in PLANTED:
        declared = re.findall(r"\b(?:u?int|float) (\w+)", mutant.new)
        assert {*word.findall(mutant.new)} <= known | {*declared}, mutant.name


def test_the_catalogue_repeats_nothing() -> None:
    for mutants in (MUTANTS, CUDA_MUTANTS):
        assert len({mutant.name for mutant in mutants}) == len(mutants)
    changes = {
        (file, mutant.marker, mutant.old, mutant.new, mutant.case)
        for mutant, file in PLANTED
    }
    assert len(changes) == len(PLANTED)


def test_a_marker_goes_to_the_next_one_or_to_a_blank_line() -> None:
    assert markers.marker_names(TEXT) == ["sum", "rest", "result"]
    changed = markers.replaced(TEXT, "sum", "return $1", "return -$1")
    assert changed == TEXT.replace("return sum", "return -sum")
    with pytest.raises(ValueError, match="occurs 0 times at 'sum'"):
        markers.replaced(TEXT, "sum", "-", "+")
    with pytest.raises(ValueError, match="occurs 0 times at 'rest'"):
        markers.replaced(TEXT, "rest", "return", "")


@pytest.mark.parametrize("names", [("a", "b"), ("left", "right.k"), ("x.n", "y")])
def test_a_fragment_does_not_depend_on_names(names: tuple[str, str]) -> None:
    text = TEXT.replace("a - b", f"{names[0]} - {names[1]}")

    changed = markers.replaced(text, "rest", "$1 - $2", "$2 - $1")

    assert changed == text.replace(
        f"{names[0]} - {names[1]}", f"{names[1]} - {names[0]}"
    )


def test_the_same_number_is_the_same_name() -> None:
    text = TEXT.replace("a - b", "a - b + a")

    changed = markers.replaced(text, "rest", "$1 - $2 + $1", "$2")

    assert changed == text.replace("a - b + a", "b")
    with pytest.raises(ValueError, match="occurs 0 times"):
        markers.replaced(text, "rest", "$1 - $1", "$1")


def test_space_and_comments_do_not_count() -> None:
    changed = markers.replaced(TEXT, "sum", "a+b;return sum", "a; return b")

    assert "const float sum = a; return b;  // a comment + b" in changed


@pytest.mark.parametrize(
    ("marker", "old", "new", "message"),
    [
        ("product", "+", "-", "marker='product' occurs 0 times, expected once"),
        ("sum", "*", "-", "old='\\*' occurs 0 times at 'sum', expected once"),
        ("rest", "$1", "", "occurs 5 times at 'rest', expected once"),
        ("sum", "a + b", "a  + b", "expected another text"),
    ],
)
def test_what_is_not_there_once_raises(
    marker: str, old: str, new: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        markers.replaced(TEXT, marker, old, new)


def test_a_marker_that_stands_twice_raises() -> None:
    text = TEXT.replace("mutant: rest", "mutant: sum")

    with pytest.raises(ValueError, match="marker='sum' occurs 2 times"):
        markers.replaced(text, "sum", "+", "-")


def test_a_mutant_is_planted_in_a_copy(tmp_path: Path) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.file == "lib/work")

    mutant.plant(source.shader_folder(), tmp_path / "shaders")

    planted = (tmp_path / "shaders" / "lib" / "work.metal").read_text(encoding="ascii")
    assert planted == mutant.changed(read("lib/work.metal"))
