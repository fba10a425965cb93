"""Shapes of products on the command line."""

import re

SHAPE = re.compile(r"(?:(\d{1,10})[x,])?(\d{1,10})[x,](\d{1,10})")
"""MxNxK or M,N,K; NxK or N,K for several M."""


def shape(text: str) -> tuple[int | None, int, int] | None:
    """Returns m, if it is given, n and k of a shape, or None if it is not a shape."""
    found = SHAPE.fullmatch(text)
    if found is None:
        return None
    m, n, k = found.groups()
    return (int(m) if m else None), int(n), int(k)


def product(text: str, option: str = "") -> tuple[int, int, int]:
    """Returns m, n and k of a shape.

    Args:
        text: The shape, such as "8x4096x4096" or "8,4096,4096".
        option: The option that has it, for messages.

    Raises:
        ValueError: If it is not a shape with m.
    """
    m, n, k = shape(text) or (None, 0, 0)
    if m is None:
        where = f"{option} {text!r}".strip()
        raise ValueError(f"{where}, expected MxNxK such as 8x4096x4096")
    return m, n, k
