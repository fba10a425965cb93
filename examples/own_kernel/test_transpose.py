"""Tests of the kernel that need no GPU: the fixture runs it in the emulator."""

import mlx.core as mx
import pytest
from transpose import KERNEL, SOURCE, WITH_RACE, launch, transpose

from metal_emulator import EmulatorError, check, trace


def matrix(rows: int, columns: int) -> mx.array:
    return mx.arange(rows * columns, dtype=mx.float32).reshape(rows, columns)


@pytest.mark.parametrize("shape", [(64, 96), (1, 1), (33, 31), (5, 100)])
def test_it_transposes(emulated_metal: None, shape: tuple[int, int]) -> None:
    x = matrix(*shape)

    assert mx.array_equal(transpose(x), x.T)


def test_its_types_and_address_spaces_are_valid_metal() -> None:
    calls = [{"inputs": [matrix(64, 96)], **launch(64, 96)}]

    check(**KERNEL, source=SOURCE, calls=calls)


def test_it_moves_whole_lines_without_bank_conflicts(emulated_metal: None) -> None:
    (found,) = trace(transpose, matrix(64, 96))

    for memory in ("x", "y"):
        assert found.of(memory).lines_128 == 64 * 96 * 4 // 128
    assert found.of("tile").bank_cycles == found.of("tile").accesses


def test_it_needs_its_last_barrier(emulated_metal: None) -> None:
    with pytest.raises(EmulatorError, match=r"race between threads.*'tile'"):
        transpose(matrix(64, 96), source=WITH_RACE)
