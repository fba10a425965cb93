"""The table of format facts: what a quantized weight may look like, and its sizes.

Everything else in the package asks this file; a number stands here once.
"""

from dataclasses import dataclass

TILE_N = 32
"""Rows of w that a simdgroup decodes at a time: four 8-row fragments. A packed tile."""
TILE_K = 64
"""Values of k, likewise: 32 bytes of a row of 4-bit codes, two packed words a lane."""
WORD_BITS = 32
"""Codes are packed into unsigned words of this many bits, low code first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to write a weight with few bits.

    Attributes:
        mode: MLX's name of the scheme.
        bits: Bits of one code.
        group_sizes: How many weights along k may share one scale.
        parameters: Values stored for a group, each in the scales' dtype
            (affine: a scale and a bias).
    """

    mode: str
    bits: int
    group_sizes: tuple[int, ...]
    parameters: int

    @property
    def codes_per_word(self) -> int:
        """Codes in one 32-bit word."""
        return WORD_BITS // self.bits


FORMATS: dict[tuple[str, int], Format] = {
    (each.mode, each.bits): each
    for each in (
        Format(mode="affine", bits=4, group_sizes=(32, 64, 128), parameters=2),
    )
}
"""The formats that our kernels read, by (mode, bits)."""

DTYPE_BYTES: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of one element, by dtype name; these are the dtypes that we serve."""

LAYOUTS: tuple[str, ...] = ("mlx", "marlin")
"""`mlx`: MLX's own row-major words, used in place. `marlin`: our packed tiles."""


def format_of(mode: str, bits: int) -> Format:
    """Returns the format of a mode and a width.

    Args:
        mode: MLX's name of the scheme, such as "affine".
        bits: Bits of one code.

    Raises:
        ValueError: If our kernels do not read this format.
    """
    try:
        return FORMATS[mode, bits]
    except KeyError:
        known = ", ".join(f"{mode} {bits}-bit" for mode, bits in FORMATS)
        raise ValueError(
            f"mode={mode!r} with bits={bits} is not one of ours: {known}"
        ) from None
