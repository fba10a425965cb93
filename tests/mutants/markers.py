"""Finds the fragment of a shader that a mutant replaces.

A comment `// mutant: NAME` marks the text from its line to the next marker or blank
line. A fragment begins in marked text and may end behind it. White space and comments
in it do not count. `$1`, `$2` and so on match any name with its members, such as
`work.k`, and stand for the same name wherever they occur again: a renamed variable
breaks no mutant.
"""

import re

_MARKER = re.compile(r"//[ ]mutant:[ ](?P<name>\w+)$", re.MULTILINE)
_END = re.compile(r"//[ ]mutant:|\n[ ]*\n")
_NAME = r"[A-Za-z_]\w*(?:(?:\.|::|->)(?![xyzw]\b)[A-Za-z_]\w*)*"
_NUMBER = r"\.?\d(?:[eEpP][+-]|[\w.])*"
_TOKEN = re.compile(rf"\$\d|{_NAME}|{_NUMBER}|\S")
_COMMENT = re.compile(r"//[^\n]*")


def marker_names(text: str) -> list[str]:
    """Returns the names of all markers of a shader, in order."""
    return [found["name"] for found in _MARKER.finditer(text)]


def replaced(text: str, marker: str, old: str, new: str) -> str:
    """Replaces the only fragment `old` of a marked text.

    Raises:
        ValueError: If there is no such marker or more than one, if the fragment does
            not begin there exactly once, or if `new` is no change.
    """
    begin, end = _marked(text, marker)
    code = _COMMENT.sub(lambda found: " " * len(found.group()), text)
    found = _matches(_pattern(old), code, begin, end)
    if len(found) != 1:
        raise ValueError(
            f"old={old!r} occurs {len(found)} times at {marker!r}, expected once"
        )
    [match] = found
    fragment = re.sub(r"\$(\d)", lambda number: match[f"_{number[1]}"], new)
    if _TOKEN.findall(fragment) == _TOKEN.findall(match.group()):
        raise ValueError(f"new={new!r} is old={old!r}, expected another text")
    return text[: match.start()] + fragment + text[match.end() :]


def _marked(text: str, marker: str) -> tuple[int, int]:
    """Returns where the text of a marker begins and ends."""
    found = [each for each in _MARKER.finditer(text) if each["name"] == marker]
    if len(found) != 1:
        raise ValueError(f"marker={marker!r} occurs {len(found)} times, expected once")
    begin = text.rfind("\n", 0, found[0].start()) + 1
    end = _END.search(text, found[0].end())
    if end is None:
        return begin, len(text)
    return begin, text.rfind("\n", 0, end.start() + 1)


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
