"""A planted bug: one replacement in one shader, and what must notice it."""

import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mutants import fragments


class Detector(StrEnum):
    """What can notice a bug; `detectors.py` says how."""

    WRONG_RESULT = "wrong result"
    ORDER = "order of addition"
    OUTSIDE = "access out of bounds"
    RACE = "race"
    UNWRITTEN = "read of what was never written"
    TOO_EARLY = "race, or read of what is not written yet"
    BARRIER_SITES = "simdgroups at different barriers"
    MISSING_THREADS = "barrier that some threads miss"
    MISALIGNED = "misaligned access"
    OUT_OF_STEP = "race, or threads that wait for ever"
    ENDLESS = "loop that does not end"
    STATIC_CHECK = "static check"
    OPERANDS = "operand types"
    COUNTERS = "counters"
    LANES = "elements and lanes of a tensor operation"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug."""

    name: str  # What is wrong
    file: str  # Below `shaders/`
    function: str  # Name of the function in which the bug begins; "" for the whole file
    old: str  # Fragment that begins there: see `fragments.py`
    new: str  # What stands there instead
    case: str  # Name of the case, in `cases` or `test_cuda_mutants.py`, that can see it
    caught_by: Detector  # What must notice it
    # Which occurrence of the fragment it is, and how many there are
    nth: fragments.Nth = (1, 1)

    def plant(self, shaders: Path, folder: Path) -> None:
        """Copies all shaders into a folder, with the bug."""
        shutil.copytree(shaders, folder)
        path = folder / self.file
        text = path.read_text(encoding="ascii")
        path.write_text(self.changed(text), encoding="ascii")

    def changed(self, text: str) -> str:
        """Returns the text of the mutant's file with the bug."""
        return fragments.replaced(text, self.function, self.old, self.new, self.nth)
