"""Clang's diagnostics in a static check, translated to Metal's terms."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from metal_emulator.compiling import build
from metal_emulator.language.lines import Location

_MESSAGE = re.compile(
    r"(?P<file>[^:\n]+):(?P<line>\d+):\d+: "
    r"(?P<kind>(?:fatal )?error|warning|note): (?P<text>.*)"
)
_TO_BFLOAT = re.compile(r".*floating-point precision: .* to '.*(?:bfloat|__bf16)")
_UNSET = re.compile(r"variable '.*' is uninitialized when used here")
_CANDIDATE = re.compile(
    r"candidate (?:function|template|constructor).*?"
    r"(?:not viable|ignored): (?P<note>.*)"
)
_VECTOR = re.compile(
    r"'(?P<space>(?:const |__\w+ )*)(?P<type>\w+) "
    r"__attribute__\(\(ext_vector_type\((?P<size>\d)\)\)\)'( \(vector of[^)]*\))?"
)
# The check's headers declare it deprecated, so that clang prints the operand types.
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
    # An array of type `auto&`.
    r"'([^']+) (__local)((?:\[\d+\])+)'": r"'\2 \1\3'",
    # Clang 19 and 20 print an address space for converted values.
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

# Metal accepts these, clang does not: `float4 x = {0}`, a temporary bound to
# `const thread T&`, and a copy of a struct from constant memory.
_FALSE_POSITIVE = re.compile(
    r"too few elements in vector initialization"
    r"|cannot bind reference in default address space to object in address space "
    r"'__private'"
    r"|temporary object because of address space mismatch"
    r"|implicit (?:copy|move) constructor\) not viable: cannot bind reference in "
    r"address space '__constant'"
)


@dataclass(frozen=True)
class Diagnostic:
    """An error or warning of clang with its notes."""

    kind: str
    text: str
    locations: tuple[Location, ...]
    notes: tuple[str, ...]

    @property
    def is_metal_error(self) -> bool:
        """Whether it is an error in Metal."""
        if self.kind == "warning":
            return any(rule.search(self.text) for rule in (_TO_BFLOAT, _UNSET))
        return not any(map(_FALSE_POSITIVE.search, (self.text, *self.notes)))

    @property
    def location(self) -> Location:
        """The first location in Metal text, or else in the emulator's headers."""
        shim = str(build.INCLUDE)
        in_text = (at for at in self.locations if not at.file.startswith(shim))
        return next(in_text, self.locations[0])

    @property
    def message(self) -> str:
        """The message in Metal's terms."""
        notes = "".join(f"\n    {note}" for note in self.candidates)
        text = f"{self.text.split(' [-W')[0]}{notes}"
        text = _VECTOR.sub(r"'\g<space>\g<type>\g<size>'", text)
        for clang, metal in _PHRASES.items():
            text = re.sub(clang, metal, text)
        return _metal(text)

    @property
    def candidates(self) -> list[str]:
        """The reasons why the first two candidate functions do not match."""
        found = [match["note"] for match in map(_CANDIDATE.match, self.notes) if match]
        return found[:2]

    @property
    def instance(self) -> str:
        """A line that names the instantiated template, or ""."""
        found = [match["name"] for match in map(_INSTANCE.match, self.notes) if match]
        return f"\n    in {_metal(found[-1])}" if found else ""


def _metal(text: str) -> str:
    """Replaces clang's names of address spaces and types by Metal's."""
    return _WORD.sub(lambda found: _WORDS[found[0]], text)


def multiplications(messages: str) -> frozenset[Operands]:
    """Returns the operand types of every matrix multiply-accumulate."""
    return frozenset(
        tuple(_metal(operands).split(", ")) for operands in _MULTIPLY.findall(messages)
    )


def diagnostics(messages: str) -> Iterator[Diagnostic]:
    """Yields errors and warnings with the notes that follow them."""
    group: list[re.Match[str]] = []
    for line in [*messages.splitlines(), "end:1:1: error: end"]:
        found = _MESSAGE.match(line)
        if found is None:
            continue
        if found["kind"] != "note" and group:
            yield _diagnostic(group)
            group = []
        group.append(found)


def _diagnostic(group: Sequence[re.Match[str]]) -> Diagnostic:
    return Diagnostic(
        kind=group[0]["kind"],
        text=group[0]["text"],
        locations=tuple(Location(found["file"], int(found["line"])) for found in group),
        notes=tuple(found["text"] for found in group[1:]),
    )
