"""Mutants that the gate repeats, each with a test that noticed it.

A mutant is kept as whole lines, so that changes elsewhere in its file leave it alone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from mutants.python.operators import Mutant
from mutants.python.runner import ROOT

FILE = ROOT / "tests/data/python_mutants.json"


@dataclass(frozen=True)
class Recorded:
    """A change of lines, and the test that notices it."""

    room: str
    file: str
    old: str
    new: str
    test: str

    def mutant(self) -> Mutant:
        """Returns the change of today's file."""
        source = (ROOT / self.file).read_bytes()
        old = self.old.encode()
        if source.count(old) != 1:
            raise ValueError(
                f"{self.file} does not have these lines once; draw other mutants of "
                f"{self.room} with --record: {self.old!r}"
            )
        start = source.index(old)
        end = start + len(old)
        return Mutant(self.file, "", 0, "recorded", start, end, self.old, self.new)


def read() -> list[Recorded]:
    """Returns all recorded mutants."""
    return [Recorded(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))]


def write(room: str, noticed: Mapping[Mutant, str]) -> None:
    """Puts mutants in the place of those that are recorded for a room, if there are."""
    if not noticed:
        return
    rows = [row for row in read() if row.room != room] if FILE.exists() else []
    for mutant, test in noticed.items():
        source = (ROOT / mutant.file).read_bytes()
        start = source.rfind(b"\n", 0, mutant.start) + 1
        end = source.find(b"\n", mutant.end)
        while source.count(source[start:end]) > 1:  # take the line before along
            start = source.rfind(b"\n", 0, start - 1) + 1
        new = (
            source[start : mutant.start]
            + mutant.new.encode()
            + source[mutant.end : end]
        )
        old = source[start:end].decode()
        rows.append(Recorded(room, mutant.file, old, new.decode(), test))
    rows.sort(key=lambda row: (row.room, row.file, row.old, row.new))
    text = json.dumps([vars(row) for row in rows], indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")
