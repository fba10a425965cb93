"""The table of format facts: what a quantized weight may look like, and its sizes.

Everything else in the package asks this file; a number stands here once.
"""

from dataclasses import dataclass
from math import lcm
from typing import Literal

Codes = Literal["affine", "symmetric", "floating", "zero_point"]

TILE_N = 32
"""Rows of w that a simdgroup decodes at a time: four 8-row fragments. A packed tile."""
TILE_K = 64
"""Values of k, likewise: sixteen codes of each of a lane's four rows."""
WORD_BITS = 32
"""Codes are packed into unsigned words of this many bits, low code first."""

CODES: tuple[Codes, ...] = ("affine", "symmetric", "floating", "zero_point")
"""What a code q of b bits stands for: scale * q + bias; scale * (q - 2^(b-1)); scale
times a small float; scale * (q - zero point)."""

DTYPE_BYTES: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of one element, by dtype name; these are the dtypes that we serve."""
SCALE_BYTES: dict[str, int] = {**DTYPE_BYTES, "uint8": 1}
"""Likewise of scales: those of floating codes are bytes."""

CHANNEL = 0
"""Among group sizes: a whole row of w, whatever its k is."""
GROUP_SIZES = (16, 32, 64, 128, 256)
"""Group sizes that kernels know as numbers; any other one is that of a whole row."""

LAYOUTS: tuple[str, ...] = ("mlx", "marlin")
"""`mlx`: MLX's own row-major words, used in place. `marlin`: our packed tiles."""


MODE_DEFAULTS = {
    "affine": (64, 4),
    "mxfp4": (32, 4),
    "mxfp8": (32, 8),
    "nvfp4": (16, 4),
}
"""(group_size, bits) that MLX takes where a call names none."""


def planes_of(bits: int) -> tuple[int, ...]:
    """Returns the bits of the planes in which packed codes lie, low bits first."""
    return {3: (2, 1), 5: (4, 1), 6: (4, 2)}.get(bits, (bits,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to write a weight with few bits.

    Attributes:
        mode: MLX's name of the scheme, or ours where MLX has none.
        bits: Bits of one code.
        codes: What a code stands for.
        group_sizes: How many weights along k may share one scale.
        layouts: The layouts that our kernels read.
        packed_group_sizes: Group sizes that the packed layout has besides.
    """

    mode: str
    bits: int
    codes: Codes
    group_sizes: tuple[int, ...]
    layouts: tuple[str, ...] = LAYOUTS
    packed_group_sizes: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """Values stored for a group, each in the scales' dtype."""
        return 2 if self.codes in ("affine", "zero_point") else 1

    @property
    def scale_dtypes(self) -> tuple[str, ...]:
        """Dtypes that its scales may have."""
        return ("uint8",) if self.codes == "floating" else (*DTYPE_BYTES,)

    def group_sizes_in(self, layout: str) -> tuple[int, ...]:
        """Returns the group sizes of a layout, `CHANNEL` among them."""
        packed = self.packed_group_sizes if layout == "marlin" else ()
        return tuple(sorted((*self.group_sizes, *packed)))

    def k_multiple(self, group_size: int) -> int:
        """Returns what k has to be a multiple of.

        A lane has sixteen codes of a step of 64: with fewer in the last step it would
        need activations past the end of a row.
        """
        return 32 if group_size == 32 else lcm(TILE_K, group_size)

    def why_not(self, group_size: int, k: int, layout: str) -> str | None:
        """Says why a weight cannot have groups of a size; None if it can.

        Args:
            group_size: Weights along k that share a scale; k itself for a whole row.
            k: Columns of the weight.
            layout: "mlx" or "marlin".
        """
        sizes = self.group_sizes_in(layout)
        named = tuple(size for size in sizes if size != CHANNEL)
        may_be_k = CHANNEL in sizes
        if group_size not in named and not (may_be_k and group_size == k):
            rows = " or k" * may_be_k
            return f"group_size={group_size} is not one of {named}{rows}"
        if k % group_size:
            return f"k={k} is not a multiple of group_size={group_size}"
        if k % self.k_multiple(group_size):
            return (
                f"k={k} is not a multiple of {TILE_K}, as {self.mode} with "
                f"group_size={group_size} needs it"
            )
        return None

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of the planes in which packed codes lie, low bits first."""
        return planes_of(self.bits)

    @property
    def codes_per_word(self) -> int:
        """Codes in one 32-bit word, where they fill words."""
        return WORD_BITS // self.bits


WIDTHS = (1, 2, 3, 4, 5, 6, 8)
"""Bits of an integer code."""
GROUPS = (32, 64, 128)
"""Weights that may share a scale in MLX's affine scheme."""
PACKED_GROUPS = (16, 256, CHANNEL)
"""Likewise of our own: stock MLX cannot serve them, so they are packed only."""
PACKED_ONLY = ("marlin",)

FORMATS: dict[tuple[str, int], Format] = {
    (each.mode, each.bits): each
    for each in (
        *(
            Format(
                mode="affine",
                bits=bits,
                codes="affine",
                group_sizes=GROUPS,
                packed_group_sizes=PACKED_GROUPS,
            )
            for bits in WIDTHS
        ),
        Format(mode="mxfp4", bits=4, codes="floating", group_sizes=(32,)),
        Format(mode="mxfp8", bits=8, codes="floating", group_sizes=(32,)),
        Format(mode="nvfp4", bits=4, codes="floating", group_sizes=(16,)),
        *(
            Format(
                mode=codes,
                bits=bits,
                codes=codes,
                group_sizes=GROUPS,
                layouts=PACKED_ONLY,
                packed_group_sizes=PACKED_GROUPS,
            )
            for codes in ("symmetric", "zero_point")
            for bits in WIDTHS[1:]
        ),
    )
}
"""The formats that our kernels read, by (mode, bits)."""
MODES: tuple[str, ...] = tuple(dict.fromkeys(mode for mode, _ in FORMATS))
"""Their schemes."""


def format_of(mode: str, bits: int) -> Format:
    """Returns the format of a mode and a width.

    Args:
        mode: The scheme, such as "affine".
        bits: Bits of a code.

    Raises:
        ValueError: If our kernels do not read this format.
    """
    try:
        return FORMATS[mode, bits]
    except KeyError:
        known = ", ".join(f"{mode} {bits}-bit" for mode, bits in FORMATS)
        raise ValueError(
            f"mode={mode!r} with bits={bits!r} is not one of ours: {known}"
        ) from None
