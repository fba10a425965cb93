"""Every mutant changes one fragment of the shaders, which carry no marks of it."""

import re
from pathlib import Path

import pytest

from mlx_marlin.backends import source
from mutants import fragments
from mutants.catalogue import CUDA_MUTANTS, MUTANTS

TEXT = """
float total(float a, float b) {
  const float sum = a + b;
  return sum;  // a comment + b
}

struct Rest {
  float rest(float a, float b) const thread {
    const float rest = a - b;
    return rest;
  }
  float rest(float a) { return a - total(a, a); }
};
"""
LANGUAGE = frozenset(
    {"abs", "atomic_store_explicit", "mem_device", "mem_none", "simdgroup_barrier"}
    | {"vertex", "yx"}
)
"""Names that only mutants use and that no shader declares."""
PLANTED = (*MUTANTS, *CUDA_MUTANTS)


def read(file: str) -> str:
    return (source.shader_folder() / file).read_text(encoding="ascii")


def shader_files() -> list[str]:
    folder = source.shader_folder()
    files = (each for each in folder.rglob("*") if each.is_file())
    return sorted(each.relative_to(folder).as_posix() for each in files)


@pytest.mark.parametrize("file", shader_files())
def test_every_mutant_changes_one_fragment(file: str) -> None:
    text = read(file)

    assert "mutant" not in text
    for mutant in PLANTED:
        if mutant.file == file:
            assert mutant.changed(text) != text


def test_every_mutant_names_a_file_of_the_shaders() -> None:
    assert {mutant.file for mutant in PLANTED} <= {*shader_files()}


def test_mutants_use_only_names_that_the_shaders_have() -> None:
    word = re.compile(r"(?<!\w)[A-Za-z_]\w*")
    texts = (re.sub("//.*", "", read(file)) for file in shader_files())
    known = {*LANGUAGE}.union(*(word.findall(text) for text in texts))
    for mutant in PLANTED:
        declared = re.findall(r"\b(?:u?int|float) (\w+)", mutant.new)
        assert {*word.findall(mutant.new)} <= known | {*declared}, mutant.name


def test_the_catalogue_repeats_nothing() -> None:
    for mutants in (MUTANTS, CUDA_MUTANTS):
        assert len({mutant.name for mutant in mutants}) == len(mutants)
    changes = {
        (each.file, each.function, each.nth, each.old, each.new, each.case)
        for each in PLANTED
    }
    assert len(changes) == len(PLANTED)


@pytest.mark.parametrize(
    ("function", "old", "new", "nth", "before", "after"),
    [
        ("total", "return $1", "return -$1", (1, 1), "return sum", "return -sum"),
        # A function is all definitions of its name.
        ("rest", "$1 -", "$1 +", (2, 2), "a - total", "a + total"),
        # Space does not count.
        ("total", "a+b;return sum", "a; return b", (1, 1), "a + b;\n  return sum", ""),
        ("", "$1 - $2;", "$2 - $1;", (1, 1), "a - b", "b - a"),
    ],
)
def test_a_fragment_is_found_in_its_function(
    function: str, old: str, new: str, nth: fragments.Nth, before: str, after: str
) -> None:
    changed = fragments.replaced(TEXT, function, old, new, nth)

    assert changed == TEXT.replace(before, after or new)


@pytest.mark.parametrize("names", [("left", "right.k"), ("x.n", "y")])
def test_a_fragment_does_not_depend_on_names(names: tuple[str, str]) -> None:
    text = TEXT.replace("a - b", "{} - {} + {}".format(*names, names[0]))

    changed = fragments.replaced(text, "rest", "$1 - $2 + $1", "$2")

    assert changed == TEXT.replace("a - b", names[1])


@pytest.mark.parametrize(
    ("function", "old", "nth", "message"),
    [
        ("", "return", (1, 1), "old='return' occurs 3 times in the file, expected 1"),
        ("rest", "return", (1, 3), "occurs 2 times in rest, expected 3"),
        ("total", "-", (1, 1), "occurs 0 times in total, expected 1"),
        ("nothing", "-", (1, 1), "occurs 0 times in nothing, expected 1"),
        ("rest", "$1 - $1", (1, 1), "occurs 0 times in rest"),
        ("total", "a + b", (1, 1), "expected another text"),
    ],
)
def test_another_number_of_occurrences_raises(
    function: str, old: str, nth: fragments.Nth, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fragments.replaced(TEXT, function, old, "a  + b", nth)


def test_a_mutant_is_planted_in_a_copy(tmp_path: Path) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.file == "lib/work.metal")

    mutant.plant(source.shader_folder(), tmp_path / "shaders")

    planted = (tmp_path / "shaders" / "lib" / "work.metal").read_text(encoding="ascii")
    assert planted == mutant.changed(read("lib/work.metal"))
