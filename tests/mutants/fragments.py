"""Finds the fragment of a shader that a mutant replaces.

A fragment is addressed by its file, the function that it begins in, its text, and which
of its occurrences there it is. White space and comments do not count. `$1`, `$2` and so
on match any name with its members, such as `work.k`, and stand for the same name
wherever they occur again: a renamed variable breaks no mutant.
"""

import re
from collections.abc import Iterator

_NAME = r"[A-Za-z_]\w*(?:(?:\.|::|->)(?![xyzw]\b)[A-Za-z_]\w*)*"
_NUMBER = r"\.?\d(?:[eEpP][+-]|[\w.])*"
_TOKEN = re.compile(rf"\$\d|{_NAME}|{_NUMBER}|\S")
_COMMENT = re.compile(r"//[^\n]*")
_BODY = re.compile(r"\s*(?:(?:const|thread)\s*)*(?::[^;{}]*)?\{")
"""What follows the parameters of a function that is defined, up to its body."""
_PAIRS = {"(": ")", "{": "}"}

Nth = tuple[int, int]
"""Which occurrence, counted from 1, and how many there are."""


def replaced(text: str, function: str, old: str, new: str, nth: Nth = (1, 1)) -> str:
    """Replaces an occurrence of a fragment."""
    code = _COMMENT.sub(lambda found: " " * len(found.group()), text)
    found = occurrences(code, function, old)
    if len(found) != nth[1]:
        where = f"in {function}" if function else "in the file"
        raise ValueError(
            f"old={old!r} occurs {len(found)} times {where}, expected {nth[1]}"
        )
    match = found[nth[0] - 1]
    fragment = re.sub(r"\$(\d)", lambda number: match[f"_{number[1]}"], new)
    if _TOKEN.findall(fragment) == _TOKEN.findall(match.group()):
        raise ValueError(f"new={new!r} is old={old!r}, expected another text")
    return text[: match.start()] + fragment + text[match.end() :]


def occurrences(code: str, function: str, old: str) -> list[re.Match[str]]:
    """Returns where a fragment begins in a function, also where it overlaps itself."""
    parts = [*_functions(code, function)] if function else [(0, len(code))]
    pattern = _pattern(old)
    return [each for part in parts for each in _matches(pattern, code, *part)]


def _functions(code: str, name: str) -> Iterator[tuple[int, int]]:
    """Yields where each function of a name begins and ends."""
    for found in re.finditer(rf"(?<![\w.]){re.escape(name)}\s*\(", code):
        body = _BODY.match(code, _end(code, found.end() - 1))
        if body is not None:
            yield found.start(), _end(code, body.end() - 1)


def _end(code: str, begin: int) -> int:
    """Returns where what is opened at a position is closed, behind the bracket."""
    opening = code[begin]
    depth = 0
    for index in range(begin, len(code)):
        depth += (code[index] == opening) - (code[index] == _PAIRS[opening])
        if depth == 0:
            return index + 1
    return len(code)


def _matches(
    pattern: re.Pattern[str], text: str, begin: int, end: int
) -> list[re.Match[str]]:
    """Returns all matches that begin in a part of a text, also if they overlap."""
    matches = []
    found = pattern.search(text, begin)
    while found and found.start() < end:
        matches.append(found)
        found = pattern.search(text, found.start() + 1)
    return matches


def _pattern(fragment: str) -> re.Pattern[str]:
    known: set[str] = set()
    parts = [_part(token, known) for token in _TOKEN.findall(fragment)]
    return re.compile(r"\s*".join(parts))


def _part(token: str, known: set[str]) -> str:
    """Returns what matches a token; a `$1` that is known matches the same name."""
    if token in known:
        return rf"(?P=_{token[1:]})(?!\w)"
    if token.startswith("$"):
        known.add(token)
        return rf"(?<!\w)(?<!\w\.)(?P<_{token[1:]}>{_NAME})(?!\w)"
    begin = r"(?<!\w)" if token[0].isalnum() or token[0] == "_" else ""
    return begin + re.escape(token) + (r"(?!\w)" if token[-1].isalnum() else "")
