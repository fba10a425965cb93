"""The packed ("marlin") layout of codes, as a table that reads both ways.

A packed weight is cut into tiles of 32 rows x 64 k. Tiles run k-fastest, so that a
stripe of tiles is one sequential stream. Codes of 3, 5 and 6 bits are cut into planes
of 2 + 1, 4 + 1 and 4 + 2 bits, low bits first; a tile holds its planes one by one.

Inside a plane each lane of a simdgroup owns whole 32-bit words, and the words that the
lanes load together lie together. A pair of codes that enters one step of the main loop
lies 16 bits apart in its word. A code's place is a mixed-radix number: its row and its
k are written as digits, and the stored order is those digits in another sequence.
`sizes` gives each digit's radix, `ROW` and `K_DIGITS` how row and k spell themselves
(most significant first), `STORED` the sequence in memory. The lane is the digits
row_high, pair_high, row_low, pair_low: that is the 8x8 fragment of Apple GPUs, and
`shaders/lib/lane.metal` draws it.
"""

from functools import lru_cache

from mlx_marlin.weights.formats import TILE_K, TILE_N, WORD_BITS

HALF_WORD = WORD_BITS // 2
"""Bits between the codes of a pair."""

ROW: tuple[str, ...] = ("fragment_word", "fragment_shared", "row_high", "row_low")
"""A row of the tile, 0 to 31."""

K_DIGITS: tuple[str, ...] = (
    "step",
    "pair_high",
    "pair_low",
    "b",
    "t_word",
    "t_shared",
)
"""A k of the tile, 0 to 63: a lane's k are neighbours, sixteen in a step of 64, eight
in one of 32, because a fragment must not leave a group of 32."""

STORED: tuple[str, ...] = (
    "step",
    "t_word",
    "row_high",
    "pair_high",
    "row_low",
    "pair_low",
    "fragment_word",
    "b",
    "fragment_shared",
    "t_shared",
)
"""The digits of a code in its plane; the last three are its place in its word."""


def order_of_group(group_size: int) -> str:
    """Returns the order of k, "k32" or "k64", of a group size in weights."""
    return "k32" if group_size == 32 else "k64"


@lru_cache
def sizes(bits: int, order: str) -> dict[str, int]:
    """Returns the radix of each digit, in a plane of 1, 2, 4 or 8 bits.

    b: which code of a pair; t: the step's pairs, of which a word holds `t_shared`, and
    where one row's pairs do not fill it those of `fragment_shared` rows.
    """
    pairs = 4 if order == "k32" else 8
    in_word = HALF_WORD // bits
    shared = max(in_word // pairs, 1)
    return {
        "step": TILE_K // (8 * pairs),
        "t_word": max(pairs // in_word, 1),
        "t_shared": min(pairs, in_word),
        "b": 2,
        "fragment_word": 4 // shared,
        "fragment_shared": shared,
        "row_high": 2,
        "row_low": 4,
        "pair_high": 2,
        "pair_low": 2,
    }


def tile_words(bits: int) -> int:
    """Returns the 32-bit words of a packed tile of codes of so many bits."""
    return TILE_N * TILE_K // WORD_BITS * bits


def padded(n: int, k: int) -> tuple[int, int]:
    """Returns the least n and k, in weights, that fill whole tiles."""
    return -(-n // TILE_N) * TILE_N, -(-k // TILE_K) * TILE_K


def position_of_weight(
    row: int, k: int, *, bits: int, order: str, k_tiles: int
) -> tuple[int, int]:
    """Returns where the code of weight [row, k] is stored, of one plane alone.

    Args:
        row: Row of the weight.
        k: Column of the weight.
        bits: Bits of the plane: 1, 2, 4 or 8.
        order: "k32" or "k64".
        k_tiles: Tiles along k of the whole weight.

    Returns:
        Index of the 32-bit word, and of the lowest bit in it.
    """
    radix = sizes(bits, order)
    tile_n, tile_row = divmod(row, TILE_N)
    tile_k, tile_column = divmod(k, TILE_K)
    digits = _digits(tile_row, ROW, radix) | _digits(tile_column, K_DIGITS, radix)
    word, place = divmod(_number(digits, STORED, radix), WORD_BITS // bits)
    return (tile_n * k_tiles + tile_k) * tile_words(bits) + word, place * bits


def weight_at(
    word: int, bit: int, *, bits: int, order: str, k_tiles: int
) -> tuple[int, int]:
    """Returns the (row, k) whose code is stored there: inverse of `position_of_weight`."""
    radix = sizes(bits, order)
    tile, inside = divmod(word, tile_words(bits))
    tile_n, tile_k = divmod(tile, k_tiles)
    digits = _digits(inside * (WORD_BITS // bits) + bit // bits, STORED, radix)
    row = _number(digits, ROW, radix)
    k = _number(digits, K_DIGITS, radix)
    return tile_n * TILE_N + row, tile_k * TILE_K + k


@lru_cache
def bit_permutation(bits: int, order: str) -> tuple[int, ...]:
    """Returns which bit of a stored place each bit of a code's number is.

    Every radix is a power of two, so where a code lies in a plane of its tile is its
    number, 64 * row + k, with the bits in another sequence.

    Args:
        bits: Bits of the plane: 1, 2, 4 or 8.
        order: "k32" or "k64".

    Returns:
        Of the eleven bits of the number, lowest first.
    """
    places = []
    for i in range((TILE_N * TILE_K).bit_length() - 1):
        row, k = divmod(1 << i, TILE_K)
        word, bit = position_of_weight(row, k, bits=bits, order=order, k_tiles=1)
        places.append(((word * WORD_BITS + bit) // bits).bit_length() - 1)
    return tuple(places)


def _digits(
    number: int, names: tuple[str, ...], radix: dict[str, int]
) -> dict[str, int]:
    digits = {}
    for name in reversed(names):
        number, digits[name] = divmod(number, radix[name])
    return digits


def _number(
    digits: dict[str, int], names: tuple[str, ...], radix: dict[str, int]
) -> int:
    number = 0
    for name in names:
        number = number * radix[name] + digits[name]
    return number
