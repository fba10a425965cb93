"""Compiler errors, with lines of the kernel in place of generated files."""

from __future__ import annotations

import re

from metal_emulator.language import lines
from metal_emulator.language.entries import ALIAS

_DIAGNOSTIC = re.compile(
    r"(?P<file>.+?):(?P<line>\d+):(?P<column>\d+): "
    r"(?P<kind>(?:fatal )?error|note): (?P<text>.*)"
)
_MAX_DIAGNOSTICS = 12
_INITIALIZER = "declaration requires a global"
"""Clang's message on an initializer, or destructor, that would run at load time."""
_PSEUDO_FILES = frozenset({"<scratch space>", "<built-in>"})
"""File names that clang gives to text from macros; they have no lines."""


def compile_message(name: str, source: lines.SourceMap, diagnostics: str) -> str:
    """Returns the compiler's messages with lines of the kernel for generated ones."""
    result = [f"kernel {name} does not compile:"]
    for line in diagnostics.splitlines():
        found = _DIAGNOSTIC.match(line)
        if found and found["file"] in _PSEUDO_FILES:
            continue
        if found and len(result) <= _MAX_DIAGNOSTICS:
            location = lines.Location(lines.shorten(found["file"]), int(found["line"]))
            text = _in_words_of_metal(found["text"].split(" [-W")[0])
            result.append(f"  {found['kind']}: {text}")
            result.append(f"    at {source.quote(location)}")
    return "\n".join(result) if len(result) > 1 else f"{result[0]}\n{diagnostics}"


def _in_words_of_metal(text: str) -> str:
    if text.startswith(_INITIALIZER):
        return "a variable of program scope is not initialized with a constant"
    if f"undeclared identifier '{ALIAS}'" in text:
        return "an #if of the text excludes this instance"
    return text
