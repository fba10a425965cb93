"""The packed ("marlin") layout: where the code of each weight is stored.

A packed weight is divided into tiles of 32 rows x 64 columns. Tiles are stored with k
fastest, so that a row of tiles is one sequential stream. Codes of 3, 5 and 6 bits are
split into planes of 2 + 1, 4 + 1 and 4 + 2 bits, low bits first. The planes of a tile
are stored one after another.

In a plane, each lane of a simdgroup owns whole 32-bit words, and the words that the
lanes load together are adjacent. The two codes of a pair, which are decoded in one step
of the main loop, are 16 bits apart in their word.

The position of a code in its plane is a permutation of the digits of its row and its
column, which are written as mixed-radix numbers: `ROW` and `K_DIGITS` list these
digits, most significant first, `sizes` their radices, and `STORED` their order in
memory. The lane is made of the digits row_high, pair_high, row_low and pair_low, which
is the 8x8 fragment of Apple GPUs. `shaders/lib/lane.metal` shows it.
"""

from functools import lru_cache

from mlx_marlin.weights.formats import TILE_K, TILE_N, WORD_BITS

HALF_WORD = WORD_BITS // 2
"""Bits between the codes of a pair."""

ROW: tuple[str, ...] = ("fragment_word", "fragment_shared", "row_high", "row_low")
"""Digits of a row of the tile, 0 to 31."""

K_DIGITS: tuple[str, ...] = (
    "step",
    "pair_high",
    "pair_low",
    "b",
    "t_word",
    "t_shared",
)
"""Digits of a column of the tile, 0 to 63. A lane has adjacent columns: sixteen in a
step of 64, or eight in a step of 32, because a fragment must not span two groups of
32."""

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
"""Digits of a code's position in its plane. The last three are the position in the
word."""


def order_of_group(group_size: int) -> str:
    """Returns the order of k, "k32" or "k64", for a group size."""
    return "k32" if group_size == 32 else "k64"


@lru_cache
def sizes(bits: int, order: str) -> dict[str, int]:
    """Returns the radix of each digit, for a plane of 1, 2, 4 or 8 bits.

    Digit b selects the code of a pair. Digits t_word and t_shared select the pair of
    the step: a word holds `t_shared` pairs of a row. If these do not fill the word, it
    holds the pairs of `fragment_shared` rows.
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
    """Returns the number of 32-bit words of a packed tile."""
    return TILE_N * TILE_K // WORD_BITS * bits


def padded(n: int, k: int) -> tuple[int, int]:
    """Returns n and k rounded up to whole tiles."""
    return -(-n // TILE_N) * TILE_N, -(-k // TILE_K) * TILE_K


def position_of_weight(
    row: int, k: int, *, bits: int, order: str, k_tiles: int
) -> tuple[int, int]:
    """Returns where the code of weight [row, k] is stored, in a weight of one plane."""
    radix = sizes(bits, order)
    tile_n, tile_row = divmod(row, TILE_N)
    tile_k, tile_column = divmod(k, TILE_K)
    digits = _digits(tile_row, ROW, radix) | _digits(tile_column, K_DIGITS, radix)
    word, code = divmod(_number(digits, STORED, radix), WORD_BITS // bits)
    return (tile_n * k_tiles + tile_k) * tile_words(bits) + word, code * bits


@lru_cache
def bit_permutation(bits: int, order: str) -> tuple[int, ...]:
    """Returns the layout of a plane as a permutation of bits.

    All radices are powers of two, so the position of a code in the plane of a tile is
    its index in the tile, 64 * row + k, with permuted bits.
    """
    permutation = []
    for i in range((TILE_N * TILE_K).bit_length() - 1):
        row, k = divmod(1 << i, TILE_K)
        word, bit = position_of_weight(row, k, bits=bits, order=order, k_tiles=1)
        permutation.append(((word * WORD_BITS + bit) // bits).bit_length() - 1)
    return tuple(permutation)


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
