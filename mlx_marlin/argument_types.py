"""Type checks of arguments; the errors name the argument and the expected type.

Calls that are already prepared are not checked again.
"""

from typing import SupportsIndex

import mlx.core as mx


def check_arrays(**arrays: object) -> None:
    """Raises TypeError if an argument is not an `mx.array`."""
    for name, value in arrays.items():
        if not isinstance(value, mx.array):
            raise _wrong(name, value, "an mx.array")


def check_optional_arrays(**arrays: object) -> None:
    """Raises TypeError if an argument is neither an `mx.array` nor None."""
    for name, value in arrays.items():
        if value is not None and not isinstance(value, mx.array):
            raise _wrong(name, value, "an mx.array or None")


def check_integers(**numbers: object) -> None:
    """Raises TypeError if an argument is not an integer."""
    for name, value in numbers.items():
        if not is_integer(value):
            raise _wrong(name, value, "an int")


def check_format(
    group_size: object, bits: object, mode: object, *, may_be_row: bool = False
) -> None:
    """Raises TypeError if an argument that describes a format has the wrong type."""
    if group_size is not None and not is_integer(group_size):
        if may_be_row and group_size != "channel":
            raise _wrong("group_size", group_size, "an int, 'channel' or None")
        if not may_be_row:
            raise _wrong("group_size", group_size, "an int or None")
    if bits is not None and not is_integer(bits):
        raise _wrong("bits", bits, "an int or None")
    if not isinstance(mode, str):
        raise _wrong("mode", mode, "a str")


def check_activation(value: object) -> None:
    """Raises TypeError if an activation is neither a string nor None."""
    if value is not None and not isinstance(value, str):
        raise _wrong("activation", value, "a str or None")


def is_integer(value: object) -> bool:
    """Returns whether a value is an integer of Python or of another library."""
    return isinstance(value, SupportsIndex) and not isinstance(value, bool | mx.array)


def _wrong(name: str, value: object, expected: str) -> TypeError:
    short = value is None or isinstance(value, str | int | float)
    shown = f"{name}={value!r}" if short else name
    return TypeError(f"{shown} must be {expected}, got {type(value).__name__}")
