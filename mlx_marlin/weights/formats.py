"""The table of quantization formats: modes, bits, group sizes and layouts.

All other modules take the properties of formats from here.
"""

from dataclasses import dataclass
from math import lcm
from typing import Literal, get_args

Codes = Literal[
    "affine",
    "symmetric",
    "floating",
    "zero_point",
    "k_affine",
    "k_symmetric",
    "codebook",
    "k_codebook",
]

TILE_N = 32
"""Rows of a packed tile: the four 8-row fragments that a simdgroup decodes at once."""
TILE_K = 64
"""Columns of a packed tile: sixteen codes for each of the four rows of a lane."""
WORD_BITS = 32
"""Bits of the unsigned words that codes are packed into, low code first."""

CODES: tuple[Codes, ...] = get_args(Codes)
"""Meaning of a code q of b bits: "affine" is scale * q + bias, "symmetric" is
scale * (q - 2^(b-1)), "floating" is scale times a small float, and "zero_point" is
scale * (q - zero point). "k_affine" is d * scale * q - dmin * minimum and "k_symmetric"
d * scale * (q - 2^(b-1)), with bytes as scales and minima, and float16 d and dmin of a
super-block. "codebook" is scale * codebook[q], and "k_codebook" d * scale *
codebook[q]: a weight has a codebook of 16 float32 numbers."""
SUPER_BLOCK = 256
"""Weights along k that share d and dmin: a super-block of GGUF's K-quants."""
CODEBOOK = 16
"""Numbers of a codebook: a code has 4 bits."""

DTYPE_BYTES: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of an element, by name of the supported dtypes of activations."""
SCALE_BYTES: dict[str, int] = {**DTYPE_BYTES, "uint8": 1, "uint16": 2}
"""Bytes of a scale, by dtype. Scales of floating codes are bytes. Scales, minima, d and
dmin of super-blocks are one array of 16-bit words."""

CHANNEL = 0
"""Entry of group size lists that stands for a whole row of w, of any length."""
GROUP_SIZES = (16, 32, 64, 128, 256)
"""Group sizes that kernels have as constants. Any other one is a whole row."""

LAYOUTS: tuple[str, ...] = ("mlx", "marlin")
"""`mlx`: MLX's row-major words, used in place. `marlin`: packed tiles."""

MODE_DEFAULTS = {
    "affine": (64, 4),
    "mxfp4": (32, 4),
    "mxfp8": (32, 8),
    "nvfp4": (16, 4),
}
"""MLX's default (group_size, bits) by mode."""


def planes_of(bits: int) -> tuple[int, ...]:
    """Returns the bits of the planes of packed codes, low bits first."""
    return {3: (2, 1), 5: (4, 1), 6: (4, 2)}.get(bits, (bits,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A quantization format."""

    mode: str  # Mode, MLX's name where MLX has the mode
    bits: int  # Bits of a code
    codes: Codes  # Meaning of a code
    group_sizes: tuple[int, ...]  # Numbers of weights along k that may share a scale
    layouts: tuple[str, ...] = LAYOUTS  # Layouts that our kernels read
    # Group sizes that only the packed layout has
    packed_group_sizes: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of values stored for a group."""
        return 2 if self.codes in ("affine", "zero_point", "k_affine") else 1

    @property
    def has_second_array(self) -> bool:
        """Whether biases or zero points are an array next to the scales."""
        return self.codes in ("affine", "zero_point")

    @property
    def has_super_blocks(self) -> bool:
        """Whether scales are bytes that share a factor in a super-block."""
        return self.codes in ("k_affine", "k_symmetric", "k_codebook")

    @property
    def has_codebook(self) -> bool:
        """Whether codes are places in a table."""
        return self.codes in ("codebook", "k_codebook")

    @property
    def has_offset(self) -> bool:
        """Whether kernels may add a number to every code: those of integers may."""
        return self.codes not in ("floating", "codebook", "k_codebook")

    @property
    def scale_dtypes(self) -> tuple[str, ...]:
        """Supported dtypes of the scales."""
        if self.has_super_blocks:
            return ("uint16",)
        return ("uint8",) if self.codes == "floating" else (*DTYPE_BYTES,)

    def scale_dtype(self, dtype: str) -> str:
        """Returns the dtype of scales for activations of a dtype: it, or integers."""
        return dtype if dtype in self.scale_dtypes else self.scale_dtypes[0]

    def group_bytes(self, group_size: int) -> int:
        """Returns the bytes of a group in a super-block.

        Scale and minimum of a group of 16 are the halves of one byte.
        """
        return 1 if group_size == 16 else self.parameters

    def records(self, k: int, group_size: int) -> tuple[int, int]:
        """Returns how the scales of a row are stored, as (records, elements of one).

        A record is a group, or a super-block with its groups. Elements have the dtype
        of the scales.
        """
        if not self.has_super_blocks:
            return -(-k // group_size), self.parameters
        octets = SUPER_BLOCK // group_size * self.group_bytes(group_size)
        return k // SUPER_BLOCK, octets // 2 + self.parameters

    def packed_records(self, k: int, group_size: int) -> tuple[int, int]:
        """Returns the same of a packed row, which has its share of the codebook.

        With a codebook, all scales are one record: see `weights.codebooks`.
        """
        records, elements = self.records(k, group_size)
        return (1, 1 + records * elements) if self.has_codebook else (records, elements)

    def scale_bytes(self, group_size: int, scale_dtype: str) -> float:
        """Returns the bytes of a group's parameters."""
        size = SCALE_BYTES[scale_dtype]
        if not self.has_super_blocks:
            return size * self.parameters
        _, elements = self.records(SUPER_BLOCK, group_size)
        return size * elements * group_size / SUPER_BLOCK

    def group_sizes_in(self, layout: str) -> tuple[int, ...]:
        """Returns the group sizes of a layout, which may include `CHANNEL`."""
        packed = self.packed_group_sizes if layout == "marlin" else ()
        return tuple(sorted((*self.group_sizes, *packed)))

    def k_multiple(self, group_size: int) -> int:
        """Returns the number that k must be a multiple of.

        A lane decodes sixteen codes of each step of 64. With fewer in the last step, it
        would read activations beyond the end of a row.
        """
        if self.has_super_blocks:
            return SUPER_BLOCK
        return 32 if group_size == 32 else lcm(TILE_K, group_size)

    def why_not(self, group_size: int, k: int, layout: str) -> str | None:
        """Returns why a group size is not supported, or None if it is.

        Args:
            group_size: Weights along k that share a scale; k for a whole row.
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
        multiple = SUPER_BLOCK if self.has_super_blocks else TILE_K
        if k % self.k_multiple(group_size):
            return (
                f"k={k} is not a multiple of {multiple}, which {self.mode} with "
                f"group_size={group_size} requires"
            )
        return None

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of the planes of packed codes, low bits first."""
        return planes_of(self.bits)


WIDTHS = (1, 2, 3, 4, 5, 6, 8)
"""Supported bits of integer codes."""
GROUPS = (32, 64, 128)
"""Group sizes of MLX's affine mode."""
PACKED_GROUPS = (16, 256, CHANNEL)
"""Further group sizes of packed weights, which stock MLX does not have."""
PACKED_ONLY = ("marlin",)

K_QUANTS: dict[int, Codes] = {
    2: "k_affine",
    3: "k_symmetric",
    4: "k_affine",
    5: "k_affine",
    6: "k_symmetric",
}
"""Codes of GGUF's Q2_K to Q6_K, by bits."""

FORMATS: dict[tuple[str, int], Format] = {
    (format.mode, format.bits): format
    for format in (
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
        Format(
            mode="codebook",
            bits=4,
            codes="codebook",
            group_sizes=GROUPS,
            layouts=PACKED_ONLY,
            packed_group_sizes=PACKED_GROUPS,
        ),
        *(
            Format(
                mode="k_quant",
                bits=bits,
                codes=codes,
                group_sizes=(32,) if bits in (4, 5) else (),
                layouts=PACKED_ONLY,
                packed_group_sizes=() if bits in (4, 5) else (16,),
            )
            for bits, codes in K_QUANTS.items()
        ),
        Format(
            mode="k_codebook",
            bits=4,
            codes="k_codebook",
            group_sizes=(32,),
            layouts=PACKED_ONLY,
        ),
    )
}
"""The supported formats, by (mode, bits)."""
MODES: tuple[str, ...] = tuple(dict.fromkeys(mode for mode, _ in FORMATS))
"""The supported modes."""


def format_of(mode: str, bits: int) -> Format:
    """Returns the format of a mode and a width."""
    try:
        return FORMATS[mode, bits]
    except KeyError:
        supported = ", ".join(f"{mode} {bits}-bit" for mode, bits in FORMATS)
        raise ValueError(
            f"mode={mode!r} with bits={bits!r} is not one of {supported}"
        ) from None


def defaults_of(mode: str, bits: int | None = None) -> tuple[int, int]:
    """Returns the default (group_size, bits) of a mode.

    `bits`: bits of a code; None for the mode's default.
    """
    group_size, default = MODE_DEFAULTS.get(mode, MODE_DEFAULTS["affine"])
    bits = default if bits is None else bits
    format = FORMATS.get((mode, bits))
    if format is not None and format.has_super_blocks:
        group_size = format.group_sizes_in("marlin")[0]
    return group_size, bits
