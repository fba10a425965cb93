"""What the preprocessor leaves out of a text, such as the other branch of an `#if`."""

from __future__ import annotations

import functools
import itertools
import re

from metal_emulator.compiling import build, compiler
from metal_emulator.compiling.limited import ExceededError, RefusedError
from metal_emulator.errors import CompileError
from metal_emulator.language.tokens import Tokens

_DIRECTIVE = re.compile(r"#\s*(?P<word>\w+)")
_CONDITIONS = frozenset(
    {"if", "ifdef", "ifndef", "elif", "elifdef", "elifndef", "else", "endif"}
)
_MARK = "mslemu_part_"
_MARKED = re.compile(rf"{_MARK}(\d+)")
_TEXTS = 128


@functools.lru_cache(_TEXTS)
def active(text: str) -> str:
    """Returns a text on the same lines, without conditions and what they leave out.

    A text that it refuses is returned as it is: the compiler says why.
    """
    tokens = Tokens(text)
    parts = _parts(tokens)
    found = compiler.find() if parts else None
    if found is None:
        return text
    try:
        output = build.preprocessed(found, _probe(tokens, parts), text)
    except ExceededError as exceeded:  # the compiler would meet the limit again
        raise CompileError(f"the text is not preprocessed: {exceeded}") from None
    except RefusedError:
        return text
    kept = {int(number) for number in _MARKED.findall(output)}
    for number, part in enumerate(parts):
        stop = tokens.line_end(part.start) if number in kept else part.stop
        tokens.blank_range(part.start, stop)
    return "".join(token.written for token in tokens)


def _directives(tokens: Tokens) -> list[tuple[int, str]]:
    """Returns the `#` of every directive, and its word."""
    found = ((mark, tokens.read(mark, end)) for mark, end in tokens.directives)
    return [
        (mark, word["word"]) for mark, text in found if (word := _DIRECTIVE.match(text))
    ]


def _parts(tokens: Tokens) -> list[range]:
    """Returns the tokens between one conditional directive and the next."""
    marks = [mark for mark, word in _directives(tokens) if word in _CONDITIONS]
    return [range(*ends) for ends in itertools.pairwise([*marks, len(tokens)])]


def _probe(tokens: Tokens, parts: list[range]) -> str:
    """Returns the directives alone, with a mark in every part."""
    numbers = {part.start: number for number, part in enumerate(parts)}
    lines = ""
    for mark, word in _directives(tokens):
        if word in _CONDITIONS or word in ("define", "undef"):
            lines += f"{tokens.read(mark, tokens.line_end(mark))}\n"
        if mark in numbers:
            lines += f"{_MARK}{numbers[mark]}\n"
    return lines
