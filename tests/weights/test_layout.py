"""The packed layout has a place for every weight, which the shaders read there."""

from itertools import product

import pytest

from mlx_marlin.weights import layout
from mlx_marlin.weights.layout import padded, position_of_weight, sizes, tile_words
from support.packed_places import weights_of_tile

ORDERS = ("k32", "k64")
PLANES = (1, 2, 4, 8)
K_TILES = 3
orders = pytest.mark.parametrize("order", ORDERS)
planes = pytest.mark.parametrize("bits", PLANES)


@planes
@orders
def test_a_place_is_the_codes_number_with_its_bits_in_another_sequence(
    order: str, bits: int
) -> None:
    places = layout.bit_permutation(bits, order)

    assert sorted(places) == [*range(11)]
    for row, k in product(range(32), range(64)):
        number = 64 * row + k
        word, bit = position_of_weight(row, k, bits=bits, order=order, k_tiles=1)
        moved = (1 << place for i, place in enumerate(places) if number >> i & 1)
        assert sum(moved) == (32 * word + bit) // bits


@planes
@orders
@pytest.mark.parametrize(("row", "k"), [(0, 0), (5, 37), (31, 63)])
def test_tiles_follow_each_other_along_k_first(
    order: str, bits: int, row: int, k: int
) -> None:
    def word(row: int, k: int) -> int:
        return position_of_weight(row, k, bits=bits, order=order, k_tiles=K_TILES)[0]

    assert word(row, k + 64) - word(row, k) == tile_words(bits) == 64 * bits
    assert word(row + 32, k) - word(row, k) == K_TILES * tile_words(bits)


@pytest.mark.parametrize(
    ("bits", "order", "row", "k", "place"),
    [
        # k = 16 * 1 + 5: pair 1 of a lane that has k 16 to 31, b = 0, t = 5. Row 13 is
        # row 5 of fragment 1: lane 16 + 2 * 1 + 1 = 19.
        (
            1,
            "k64",
            13,
            21,
            (2 * 19, 8 + 5),
        ),  # 8 pairs each of fragments 0 and 1 in a word
        (2, "k64", 13, 21, (4 * 19 + 1, 2 * 5)),  # a word of 8 pairs for each fragment
        (8, "k64", 13, 21, (256 + 4 * 19 + 1, 8)),  # 2 pairs a word: the third of four
        # The same row, k = 32 + 8 * 3 + 4 + 2: step 1, pair 3, b = 1, t = 2, whose lane
        # is 16 + 2 * 1 + 8 + 1 = 27.
        (1, "k32", 13, 62, (32 + 27, 16 + 4 + 2)),  # all four fragments share a word
        (2, "k32", 13, 62, (64 + 2 * 27, 16 + 2 * (4 + 2))),  # fragments 0 and 1 do
        (8, "k32", 13, 62, (256 + 128 + 4 * 27 + 1, 16)),
    ],
)
def test_these_places_were_computed_by_hand(
    bits: int, order: str, row: int, k: int, place: tuple[int, int]
) -> None:
    assert place == position_of_weight(row, k, bits=bits, order=order, k_tiles=1)


def lanes() -> list[tuple[int, int]]:
    """Returns (row, pair) of each lane, from the picture in `lane.metal`."""
    positions = {}
    for row in range(8):
        first = 2 * (row % 4) + 16 * (row // 4)  # rows 0 and 4: lanes 0 and 16
        for pair, lane in enumerate((first, first + 1, first + 8, first + 9)):
            positions[lane] = (row, pair)
    return [positions[lane] for lane in range(32)]


@planes
@orders
def test_a_lane_decodes_the_weights_that_the_shader_means(
    order: str, bits: int
) -> None:
    pairs = 4 if order == "k32" else 8
    in_word = 16 // bits
    words = 4 * pairs // in_word  # of a lane in a step
    loaded = min(words, 4)  # together
    for (lane, (row, pair)), step, fragment, t, b in product(
        enumerate(lanes()), range(8 // pairs), range(4), range(pairs), (0, 1)
    ):
        k = step * 8 * pairs + pairs * (2 * pair + b) + t
        # Of the lane's pairs of a step: by words of pairs, then fragments, or where a
        # row's pairs leave room in a word, the fragments that share it.
        if in_word <= pairs:
            own, slot = t // in_word * 4 + fragment, t % in_word
        else:
            own, slot = divmod(fragment * pairs + t, in_word)
        chunk, inside = divmod(own, loaded)
        word = 32 * (words * step + loaded * chunk) + loaded * lane + inside

        place = word, 16 * b + bits * slot
        assert weights_of_tile(bits, order)[place] == (8 * fragment + row, k)


@planes
@pytest.mark.parametrize(
    ("group_size", "order"), [(16, "k64"), (32, "k32"), (64, "k64"), (128, "k64")]
)
def test_a_step_stays_in_one_group_and_a_lane_in_one_of_16(
    group_size: int, order: str, bits: int
) -> None:
    assert order == layout.order_of_group(group_size)
    words_in_step = tile_words(bits) // sizes(bits, order)["step"]
    for first in range(0, tile_words(bits), words_in_step):
        groups_of: dict[int, set[int]] = {}
        for place in product(range(first, first + words_in_step), range(0, 32, bits)):
            _, k = weights_of_tile(bits, order)[place]
            loaded = min(words_in_step // 32, 4)  # adjacent words of a lane
            lane = place[0] // loaded % 32
            key = lane if group_size == 16 else 0
            groups_of.setdefault(key, set()).add(k // group_size)

        assert all(len(groups) == 1 for groups in groups_of.values())


def test_padding_is_the_least_that_fills_tiles() -> None:
    for n, k in product((1, 31, 32, 33, 64, 65), (32, 64, 96, 128, 160)):
        padded_n, padded_k = padded(n, k)

        assert n <= padded_n < n + 32
        assert k <= padded_k < k + 64
        assert (padded_n % 32, padded_k % 64) == (0, 0)
