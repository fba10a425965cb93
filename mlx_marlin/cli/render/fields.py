"""Access to the fields of JSON objects that may come from a stranger."""

import math
from typing import Any

LONGEST = 500
"""Characters of a text that are shown."""


class Fields:
    """A JSON object of which anything may be missing.

    Args:
        data: A value that was decoded from JSON.
        where: Its place in the document, for messages.

    Raises:
        ValueError: If the value is not an object.
    """

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise ValueError(f"{where} is {_short(data)}, expected an object")
        self._data = data
        self._where = where

    def text(self, key: str) -> str:
        """Returns a text in printable characters; "" if there is none."""
        return shown(self._data.get(key))

    def number(self, key: str) -> float | None:
        """Returns a finite number; None if there is none."""
        return number(self._data.get(key))

    def integer(self, key: str) -> int | None:
        """Returns an integer; None if there is none."""
        value = self.number(key)
        return int(value) if value is not None and value == int(value) else None

    def fields(self, key: str) -> "Fields":
        """Returns an object; one without fields if it is missing or null.

        Raises:
            ValueError: If the value is something else.
        """
        value = self._data.get(key)
        return Fields({} if value is None else value, f"{self._where}.{key}")

    def rows(self, key: str) -> list["Fields"]:
        """Returns a list of objects; an empty one if it is missing or null.

        Raises:
            ValueError: If the value is something else.
        """
        return [
            Fields(row, f"{self._where}.{key}[{index}]")
            for index, row in enumerate(self._list(key))
        ]

    def texts(self, key: str) -> list[str]:
        """Returns a list of texts; an empty one if it is missing or null.

        Raises:
            ValueError: If the value is not a list.
        """
        return [*map(shown, self._list(key))]

    def _list(self, key: str) -> list[Any]:
        value = self._data.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise ValueError(f"{self._where}.{key} is {_short(value)}, expected a list")
        return value


def number(value: Any) -> float | None:
    """Returns a number of JSON, or None if it is not one or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # of an integer
        return None
    return found if math.isfinite(found) else None


def shown(value: Any) -> str:
    """Returns a text, in which spaces replace characters that cannot be printed.

    Controls, directional overrides and lone surrogates are such characters.
    """
    if not isinstance(value, str):
        return ""
    start = value[: LONGEST + 1]
    printable = "".join(char if char.isprintable() else " " for char in start)
    return f"{printable[:LONGEST]}..." if len(start) > LONGEST else printable


def _short(value: Any) -> str:
    return shown(repr(value))[:60] if not isinstance(value, list) else "a list"
