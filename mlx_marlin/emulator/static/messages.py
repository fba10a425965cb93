"""What clang says in a static check, and what Metal would say of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlx_marlin.emulator.compiling import build
from mlx_marlin.emulator.language.lines import Place

_MESSAGE = re.compile(
    r"(?P<file>[^:\n]+):(?P<line>\d+):\d+: "
    r"(?P<kind>(?:fatal )?error|warning|note): (?P<text>.*)"
)
_TO_BFLOAT = re.compile(r".*floating-point precision: .* to '.*(?:bfloat|__bf16)")
_UNSET = re.compile(r"variable '.*' is uninitialized when used here")
_CANDIDATE = re.compile(
    r"candidate (?:function|template|constructor).*?(?:not viable|ignored): (?P<why>.*)"
)
_VECTOR = re.compile(
    r"'(?P<space>(?:const |__\w+ )*)(?P<type>\w+) "
    r"__attribute__\(\(ext_vector_type\((?P<size>\d)\)\)\)'( \(vector of[^)]*\))?"
)
# The check's headers call it deprecated, for clang to spell the operands out.
_MULTIPLY = re.compile(
    r"'simdgroup_multiply_accumulate<(?P<operands>[^']*)>' is deprecated"
)
_INSTANCE = re.compile(r"in instantiation of .* '(?P<name>.*)' requested here")
_WORDS = {
    "__global": "device",
    "__local": "threadgroup",
    "__constant": "constant",
    "__private": "thread",
    "__generic": "unqualified",
    "__bf16": "bfloat",
}
_PHRASES = {
    # An array behind `auto&`.
    r"'([^']+) (__local)((?:\[\d+\])+)'": r"'\2 \1\3'",
    # Clang 19 and 20 give converted values an address space.
    r"precision: '__private ": "precision: '",
    r" to '__private (\w+)' \(aka '__private ": r" to '\1' (aka '",
    r"(type 'double').*": r"\1, which Metal does not have",
    r"'this' argument to member function '(.*)' has type "
    r"'(.*__(?:global|local|constant).*)', but .*": (
        r"method '\1' is for objects in thread memory, not for '\2'"
    ),
}
_WORD = re.compile("|".join(_WORDS))

Operands = tuple[str, ...]
"""Element types of the four matrices of a multiply-accumulate: d, a, b, c."""

# What Metal accepts and clang's mode does not: a temporary bound to `const thread T&`,
# and the copy of a struct out of constant memory.
_FALSE_ALARM = re.compile(
    r"cannot bind reference in default address space to object in address space "
    r"'__private'"
    r"|temporary object because of address space mismatch"
    r"|implicit (?:copy|move) constructor\) not viable: cannot bind reference in "
    r"address space '__constant'"
)


@dataclass(frozen=True)
class Complaint:
    """One error or warning of clang with the notes that belong to it."""

    kind: str
    text: str
    places: tuple[Place, ...]
    notes: tuple[str, ...]

    @property
    def counts(self) -> bool:
        """Whether Metal would complain too."""
        if self.kind == "warning":
            return any(rule.search(self.text) for rule in (_TO_BFLOAT, _UNSET))
        return not any(map(_FALSE_ALARM.search, (self.text, *self.notes)))

    @property
    def place(self) -> Place:
        """Where it is in Metal text, else in the emulator's headers."""
        shim = str(build.INCLUDE)
        own = (place for place in self.places if not place.file.startswith(shim))
        return next(own, self.places[0])

    @property
    def sentence(self) -> str:
        """The message in Metal's words."""
        why = "".join(f"\n    {note}" for note in self.candidates)
        text = f"{self.text.split(' [-W')[0]}{why}"
        text = _VECTOR.sub(r"'\g<space>\g<type>\g<size>'", text)
        for clang, metal in _PHRASES.items():
            text = re.sub(clang, metal, text)
        return _metal(text)

    @property
    def candidates(self) -> list[str]:
        """Why the first functions of that name did not fit."""
        found = [match["why"] for match in map(_CANDIDATE.match, self.notes) if match]
        return found[:2]

    @property
    def instance(self) -> str:
        """A line that names the template being filled in, or nothing."""
        found = [match["name"] for match in map(_INSTANCE.match, self.notes) if match]
        return f"\n    in {_metal(found[-1])}" if found else ""


def _metal(text: str) -> str:
    """Clang's words for Metal's."""
    return _WORD.sub(lambda found: _WORDS[found[0]], text)


def multiplications(messages: str) -> frozenset[Operands]:
    """The operand types of every matrix multiply-accumulate that clang has met."""
    return frozenset(
        tuple(_metal(operands).split(", ")) for operands in _MULTIPLY.findall(messages)
    )


def complaints(messages: str) -> Iterator[Complaint]:
    """Errors and warnings, each with the notes behind it."""
    group: list[re.Match[str]] = []
    for line in [*messages.splitlines(), "end:1:1: error: end"]:
        found = _MESSAGE.match(line)
        if found is None:
            continue
        if found["kind"] != "note" and group:
            yield _complaint(group)
            group = []
        group.append(found)


def _complaint(group: Sequence[re.Match[str]]) -> Complaint:
    return Complaint(
        kind=group[0]["kind"],
        text=group[0]["text"],
        places=tuple(Place(found["file"], int(found["line"])) for found in group),
        notes=tuple(found["text"] for found in group[1:]),
    )
