"""Every planted bug is noticed by what must notice it, and nothing else is reported."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_marlin.backends import source
from mutants.cases import CASES
from mutants.catalogue import MUTANTS
from mutants.detectors import detect
from mutants.mutant import Detector, Mutant
from support import planted_text
from support.trace_mode import emulator_only

pytestmark = [pytest.mark.mutant, emulator_only]

ASKED = sorted({(mutant.caught_by, mutant.case) for mutant in MUTANTS})


@pytest.fixture
def plant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[Mutant], None]]:
    """Returns what puts a mutant in the shaders' place."""

    def put(mutant: Mutant) -> None:
        folder = tmp_path / "shaders"
        mutant.plant(source.shader_folder(), folder)
        planted_text.plant(folder, monkeypatch)

    planted_text.forget_texts()
    yield put
    monkeypatch.undo()
    planted_text.forget_texts()


@pytest.mark.parametrize(
    "mutant", [pytest.param(mutant, id=mutant.name) for mutant in MUTANTS]
)
def test_a_planted_bug_is_noticed(
    mutant: Mutant,
    plant: Callable[[Mutant], None],
    record_property: Callable[[str, object], None],
) -> None:
    record_property("mutant", f"{mutant.file}: {mutant.name}")
    record_property("caught_by", str(mutant.caught_by))
    plant(mutant)

    assert detect(mutant.caught_by, CASES[mutant.case])


@pytest.mark.parametrize(("detector", "case"), ASKED)
def test_no_detector_says_anything_of_our_own_shaders(
    detector: Detector, case: str
) -> None:
    assert detect(detector, CASES[case]) is None


def test_every_detector_and_every_case_is_needed() -> None:
    # Bugs of turns are planted in a CUDA kernel alone.
    asked = {mutant.caught_by for mutant in MUTANTS} | {Detector.OUT_OF_STEP}
    assert asked == set(Detector)
    assert {mutant.case for mutant in MUTANTS} == set(CASES)
