"""Checked access to the fields of a JSON object."""

import re
from collections.abc import Sequence
from typing import Any

LONGEST_NAME = 120
NAME = re.compile(rf"[A-Za-z0-9 ._,()+:/#~-]{{0,{LONGEST_NAME}}}")
"""Names of chips, systems, versions and models, without characters of markup."""
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9 ._,()+:/#~-]")
TEXT = re.compile(r"[ -~→]{0,600}")
MARKUP = re.compile(r"[<>|`]")


def as_name(text: str) -> str:
    """Returns a text as a name that `Fields.name` reads."""
    return NOT_IN_NAMES.sub("-", text)[:LONGEST_NAME]


class Fields:
    """The fields of an object, each of which must be read once.

    Args:
        data: A value that was decoded from JSON.
        where: Its place in the file, for messages.

    Raises:
        ValueError: If the value is not an object.
    """

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise ValueError(f"{where} is {_short(data)}, expected an object")
        self._data = data
        self._unread = {*data}
        self._where = where

    def raw(self, key: str) -> Any:
        """Returns a field as it is."""
        if key not in self._data:
            raise ValueError(f"{self._where} has no {key!r}")
        self._unread.discard(key)
        return self._data[key]

    def name(self, key: str) -> str:
        """Returns a short text without characters of markup."""
        return self._matching(key, NAME)

    def text(self, key: str) -> str:
        """Returns a line of printable characters without those of HTML and tables."""
        value = self._matching(key, TEXT)
        if MARKUP.search(value):
            raise self._wrong(key, value, "a text without markup")
        return value

    def choice(self, key: str, values: Sequence[str]) -> str:
        """Returns a text that is one of some values."""
        value = self.raw(key)
        if not isinstance(value, str) or value not in values:
            raise self._wrong(key, value, f"one of {', '.join(values)}")
        return value

    def integer(self, key: str, least: int, most: int) -> int:
        """Returns an integer within bounds."""
        value = self.raw(key)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(key, value, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, least: float, most: float) -> float:
        """Returns a number within bounds."""
        value = self.raw(key)
        if type(value) not in (int, float) or not least <= value <= most:
            raise self._wrong(key, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def list(self, key: str, most: int) -> list[Any]:
        """Returns a list of limited length."""
        value = self.raw(key)
        if not isinstance(value, list) or len(value) > most:
            raise self._wrong(key, value, f"a list of at most {most} values")
        return value

    def done(self) -> None:
        """Checks that no field is left.

        Raises:
            ValueError: If there is one.
        """
        if self._unread:
            names = ", ".join(sorted(self._unread))
            raise ValueError(f"{self._where} has unknown fields: {_short(names)}")

    def _matching(self, key: str, pattern: re.Pattern[str]) -> str:
        value = self.raw(key)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise self._wrong(key, value, "a line of printable characters")
        return value

    def _wrong(self, key: str, value: Any, expected: str) -> ValueError:
        return ValueError(
            f"{self._where}.{key} is {_short(value)}, expected {expected}"
        )


def _short(value: Any) -> str:
    return f"{value!r}"[:60]
