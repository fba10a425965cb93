"""The packed layout's two maps are inverse, and lanes find their codes by them."""

from itertools import product

import pytest

from mlx_marlin import layout
from mlx_marlin.layout import (
    K_DIGITS,
    ROW,
    SIZES,
    STORED,
    TILE_WORDS,
    padded,
    weight_of_word,
    word_of_weight,
)

ORDERS = ("k32", "k64")
N_TILES, K_TILES = 2, 3


@pytest.mark.parametrize("order", ORDERS)
def test_the_maps_are_inverse_bijections(order: str) -> None:
    weights = [*product(range(32 * N_TILES), range(64 * K_TILES))]

    places = [word_of_weight(*each, order=order, k_tiles=K_TILES) for each in weights]

    assert sorted(places) == [*product(range(N_TILES * K_TILES * 256), range(8))]
    assert weights == [
        weight_of_word(*each, order=order, k_tiles=K_TILES) for each in places
    ]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("row", "k"), [(0, 0), (5, 37), (31, 63)])
def test_tiles_follow_each_other_along_k_first(order: str, row: int, k: int) -> None:
    def word(row: int, k: int) -> int:
        return word_of_weight(row, k, order=order, k_tiles=K_TILES)[0]

    assert word(row, k + 64) - word(row, k) == TILE_WORDS == 256
    assert word(row + 32, k) - word(row, k) == K_TILES * TILE_WORDS


@pytest.mark.parametrize("order", ORDERS)
def test_every_digit_is_spelled_once_on_both_sides(order: str) -> None:
    assert sorted(ROW + K_DIGITS[order]) == sorted(STORED) == sorted(SIZES)


def lanes() -> list[tuple[int, int]]:
    """Returns (row, pair) of each lane, from the picture in `lane.metal`."""
    positions = {}
    for row in range(8):
        first = 2 * (row % 4) + 16 * (row // 4)  # rows 0 and 4: lanes 0 and 16
        for pair, lane in enumerate((first, first + 1, first + 8, first + 9)):
            positions[lane] = (row, pair)
    return [positions[lane] for lane in range(32)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lane", range(32))
def test_a_lane_decodes_the_weights_that_the_shader_means(
    order: str, lane: int
) -> None:
    row, pair = lanes()[lane]
    for h, fragment, s, b in product(range(2), range(4), range(4), range(2)):
        column = 2 * pair + b
        # k32: one word a lane and step, and h is the half of the tile.
        k = 32 * h + 4 * column + s if order == "k32" else 8 * column + 4 * h + s

        # The lane's four words of a step, one for each fragment, are one load.
        word, nibble = 128 * h + 4 * lane + fragment, s + 4 * b

        assert (8 * fragment + row, k) == weight_of_word(
            word, nibble, order=order, k_tiles=K_TILES
        )


@pytest.mark.parametrize(
    ("group_size", "order"), [(32, "k32"), (64, "k64"), (128, "k64")]
)
def test_a_step_stays_in_one_group(group_size: int, order: str) -> None:
    assert order == layout.order_of_group(group_size)
    words_in_step = 128 if order == "k32" else 256
    for step in range(0, TILE_WORDS, words_in_step):
        places = product(range(step, step + words_in_step), range(8))
        groups = {
            weight_of_word(*each, order=order, k_tiles=1)[1] // group_size
            for each in places
        }

        assert len(groups) == 1


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 65])
@pytest.mark.parametrize("k", [32, 64, 96, 128, 160])
def test_padding_is_the_least_that_fills_tiles(n: int, k: int) -> None:
    padded_n, padded_k = padded(n, k)

    assert n <= padded_n < n + 32
    assert k <= padded_k < k + 64
    assert (padded_n % 32, padded_k % 64) == (0, 0)
