"""Reads the planted bugs, in Metal and in CUDA, from the text files beside this one.

A file has blocks with an empty line between them: `# ` and what the file is about;
`file ` and the file below `shaders/` that the following mutants change; or a mutant:

    slots lie a column apart in the workspace     its name: what is wrong
    @ store, 2 of 2                               function, occurrence; if not 1 of 1
    - * $1                                        the fragment: `fragments.py`
    +                                             what stands there instead
    ? wrong result: gemm, idle threadgroups       what must notice it, and on which case
"""

import re
from collections.abc import Iterator
from pathlib import Path

from mutants.mutant import Detector, Mutant

_MUTANT = re.compile(
    r"(?P<name>[^-+@?\n].*)\n"
    r"(?:@ (?P<function>[A-Za-z_]\w*)?(?:, )?(?:(?P<nth>\d+) of (?P<total>\d+))?\n)?"
    r"- (?P<old>.+)\n"
    r"\+ ?(?P<new>.*)\n"
    r"\? (?P<caught_by>[^:]+): (?P<case>.+)"
)


def _read(back_end: str) -> Iterator[Mutant]:
    for path in sorted((Path(__file__).parent / back_end).glob("*.txt")):
        file = ""
        for block in path.read_text(encoding="ascii").strip().split("\n\n"):
            if block.startswith("file "):
                file = block.removeprefix("file ")
            elif not block.startswith("# "):
                found = _MUTANT.fullmatch(block)
                if found is None:
                    raise ValueError(f"{path.name} has {block!r}, expected a mutant")
                yield _mutant(file, found)


def _mutant(file: str, found: re.Match[str]) -> Mutant:
    return Mutant(
        name=found["name"],
        file=file,
        function=found["function"] or "",
        old=found["old"],
        new=found["new"],
        case=found["case"],
        caught_by=Detector(found["caught_by"]),
        nth=(int(found["nth"] or 1), int(found["total"] or 1)),
    )


MUTANTS = (*_read("metal"),)
CUDA_MUTANTS = (*_read("cuda"),)
"""Bugs planted in the CUDA kernels, by `test_cuda_mutants.py`."""
