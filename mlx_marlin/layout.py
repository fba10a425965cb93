"""The packed ("marlin") layout of 4-bit codes, as a table that reads both ways.

A packed weight is cut into tiles of 32 rows x 64 k. Tiles run k-fastest, so that a
stripe of tiles is one sequential stream. Inside a tile each lane of a simdgroup owns
eight 32-bit words, one for each of its four fragment rows and each half `h` of its
k; the words that the lanes load together lie together:

    [tile_n][tile_k][h][lane][fragment]  one word, eight codes

A weight's place is a mixed-radix number: its row and its k are written as digits, and
the stored order is those digits in another sequence. `SIZES` gives each digit's radix,
`ROW` and `K_DIGITS` how row and k spell themselves (most significant first), `STORED`
the sequence in memory. The lane is the digits row_high, pair_high, row_low, pair_low:
that is the 8x8 fragment of Apple GPUs, and `shaders/lib/lane.metal` draws it.
"""

from mlx_marlin.formats import TILE_K, TILE_N

TILE_WORDS = TILE_N * TILE_K // 8
"""32-bit words in a packed tile."""

SIZES: dict[str, int] = {
    "fragment": 4,
    "row_high": 2,
    "row_low": 4,
    "pair_high": 2,
    "pair_low": 2,
    "h": 2,
    "b": 2,
    "s": 4,
}
"""Radix of each digit. b: which of the lane's two columns; s: step within a word."""

ROW: tuple[str, ...] = ("fragment", "row_high", "row_low")
"""A row of the tile, 0 to 31."""

K_DIGITS: dict[str, tuple[str, ...]] = {
    "k64": ("pair_high", "pair_low", "b", "h", "s"),
    "k32": ("h", "pair_high", "pair_low", "b", "s"),
}
"""A k of the tile, 0 to 63, by order. k64: a lane's activations are eight neighbours.
k32: each half of the tile is one group of 32, which a fragment must not leave."""

STORED: tuple[str, ...] = (
    "h",
    "row_high",
    "pair_high",
    "row_low",
    "pair_low",
    "fragment",
    "b",
    "s",
)
"""The digits of a code in its tile; the last two are its nibble, the rest its word."""


def order_of_group(group_size: int) -> str:
    """Returns the order of k, "k32" or "k64", of a group size in weights."""
    return "k32" if group_size == 32 else "k64"


def padded(n: int, k: int) -> tuple[int, int]:
    """Returns the least n and k, in weights, that fill whole tiles."""
    return -(-n // TILE_N) * TILE_N, -(-k // TILE_K) * TILE_K


def word_of_weight(row: int, k: int, *, order: str, k_tiles: int) -> tuple[int, int]:
    """Returns where the code of weight [row, k] is stored.

    Args:
        row: Row of the weight.
        k: Column of the weight.
        order: "k32" or "k64".
        k_tiles: Tiles along k of the whole weight.

    Returns:
        Index of the 32-bit word, and of the nibble in it (0 is the lowest).
    """
    tile_n, tile_row = divmod(row, TILE_N)
    tile_k, tile_column = divmod(k, TILE_K)
    digits = _digits(tile_row, ROW) | _digits(tile_column, K_DIGITS[order])
    word, nibble = divmod(_number(digits, STORED), 8)
    return (tile_n * k_tiles + tile_k) * TILE_WORDS + word, nibble


def weight_of_word(
    word: int, nibble: int, *, order: str, k_tiles: int
) -> tuple[int, int]:
    """Returns the (row, k) whose code is stored there: inverse of `word_of_weight`."""
    tile, inside = divmod(word, TILE_WORDS)
    tile_n, tile_k = divmod(tile, k_tiles)
    digits = _digits(inside * 8 + nibble, STORED)
    row = _number(digits, ROW)
    k = _number(digits, K_DIGITS[order])
    return tile_n * TILE_N + row, tile_k * TILE_K + k


def _digits(number: int, names: tuple[str, ...]) -> dict[str, int]:
    digits = {}
    for name in reversed(names):
        number, digits[name] = divmod(number, SIZES[name])
    return digits


def _number(digits: dict[str, int], names: tuple[str, ...]) -> int:
    number = 0
    for name in names:
        number = number * SIZES[name] + digits[name]
    return number
