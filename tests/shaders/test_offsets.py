"""The shaders count beyond 32 bits where several weights together may be that large."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_marlin.backends.metal import launches
from mlx_marlin.weights.formats import TILE_K, TILE_N, WIDTHS
from support import shader_functions
from support.marks import needs_emulator
from support.profiles import sampled

pytestmark = needs_emulator

LARGE = st.integers(0, 2**31 - 1)


@given(cases=st.lists(st.tuples(LARGE, LARGE), min_size=1, max_size=64))
@settings(max_examples=50)
def test_an_expert_may_begin_beyond_32_bits(cases: list[tuple[int, int]]) -> None:
    experts, sizes = zip((600, 2**23), *cases, strict=True)

    offsets = shader_functions.expert_offsets(experts[:64], sizes[:64])

    assert offsets[0] > 2**32
    assert offsets == [a * b for a, b in zip(experts, sizes, strict=True)][:64]


@sampled(3)
@pytest.mark.parametrize("bits", WIDTHS)
@given(
    n=st.integers(1, 2**16),
    k_tiles=st.integers(1, 2**12),
    batches=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=32),
)
@settings(max_examples=10)
def test_a_weight_of_a_batch_may_begin_beyond_32_bits(
    bits: int, n: int, k_tiles: int, batches: list[int]
) -> None:
    n, k_tiles = max(n, 2**12), max(k_tiles, 2**8)
    tiles = launches.repack_tiles(bits)
    last = (-(-k_tiles // tiles) - 1, -(-n // TILE_N) - 1)
    positions = [(*last, batch) for batch in (*batches, 2**16 - 1)]

    offsets = shader_functions.repack_offsets(
        positions, n=n, k=TILE_K * k_tiles, bits=bits
    )

    words = TILE_K // 32 * bits  # of a row of a tile
    n_tiles = -(-n // TILE_N)
    expected = [
        (
            ((z * n + y * TILE_N) * k_tiles + x * tiles) * words,
            ((z * n_tiles + y) * k_tiles + x * tiles) * words * TILE_N,
        )
        for x, y, z in positions
    ]
    assert min(expected[-1]) > 2**32
    assert offsets == expected
