"""What a text needs of the Metal language and of macOS."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from metal_emulator.language.tokens import Tokens
from metal_emulator.static.rules import Finding

Version = tuple[int, int]


@dataclass(frozen=True)
class Requirement:
    """The oldest versions that have a word."""

    metal: Version  # Version of the language
    macos: Version  # Version of the system


_METAL_3_1 = Requirement((3, 1), (14, 0))
_METAL_3_2 = Requirement((3, 2), (15, 0))
_METAL_4 = Requirement((4, 0), (26, 0))
_COOPERATIVE = Requirement((4, 0), (26, 2))
NEEDS = {
    "bfloat": _METAL_3_1,
    "simdgroup_bfloat8x8": _METAL_3_1,
    "atomic_thread_fence": _METAL_3_2,
    "coherent": _METAL_3_2,
    "mpp": _METAL_4,
    "MetalPerformancePrimitives": _METAL_4,
    "metal_tensor": _METAL_4,
    "tensor_inline": _METAL_4,
    "get_left_input_cooperative_tensor": _COOPERATIVE,
    "get_right_input_cooperative_tensor": _COOPERATIVE,
}
"""Words that older versions lack.

Sources: Metal Shading Language specification 3.2 and 4, and for cooperative operands
MLX, which uses them from macOS 26.2 on (`is_nax_available` in its device.cpp).
"""
_LANGUAGES: tuple[tuple[int, Version], ...] = (
    (27, (4, 1)),
    (26, (4, 0)),
    (15, (3, 2)),
    (0, (3, 1)),
)
"""Language in which MLX compiles a custom kernel, by the first macOS that has it
(`get_metal_version` in its device.cpp)."""


def parsed(macos: str) -> Version:
    """Returns a version of macOS as numbers."""
    found = re.fullmatch(r"(\d+)(?:\.(\d+)(?:\.\d+)?)?", macos)
    if found is None:
        raise ValueError(f"macos={macos!r}, expected a version such as '26.2'")
    return int(found[1]), int(found[2] or 0)


def language_of(macos: str) -> Version:
    """Returns the version of the language in which MLX compiles a custom kernel."""
    system, _ = parsed(macos)
    return next(metal for first, metal in _LANGUAGES if system >= first)


def too_new(tokens: Tokens, macos: str) -> Iterator[Finding]:
    """Finds words that a version of macOS lacks."""
    system, language = parsed(macos), language_of(macos)
    line, seen = 0, set()
    for token in tokens:
        need = NEEDS.get(token.text)
        lacks = need is not None and (need.metal > language or need.macos > system)
        if need is not None and lacks and token.text not in seen:
            seen.add(token.text)
            yield (
                line,
                (
                    f"{token.text!r} needs Metal {_text(need.metal)} and macOS "
                    f"{_text(need.macos)}; macOS {_text(system)} compiles Metal "
                    f"{_text(language)}"
                ),
            )
        line += token.text.count("\n")


def _text(version: Version) -> str:
    return ".".join(map(str, version))
