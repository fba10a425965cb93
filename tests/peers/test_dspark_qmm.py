"""mlx-dspark's `skinny_qmm`, unmodified, on the emulator, traced for races."""

import mlx.core as mx
import numpy as np
import pytest

import metal_emulator
from peers import dspark
from peers.mlx_products import TOLERANCE, Operands, Product, Record

pytestmark = pytest.mark.peer

SHAPES = ((8, 64), (72, 320), (208, 192), (1032, 128), (4104, 192))
"""n and k: its three geometries, the last threadgroup's columns partly missing."""
ROWS = (1, 4, 5, 8, 9, 13, 16, 17, 24, 32)


def operands(m: int, n: int, k: int, bits: int) -> Operands:
    product = Product(
        kernel="qmm_t", mode="affine", dtype=mx.bfloat16, m=m, n=n, k=k, bits=bits
    )
    return Operands.of(product)


def compute(given: Operands, bits: int) -> mx.array:
    weight = [array[0] for array in given.weight.values()]
    with metal_emulator.emulated(trace=True):
        return dspark.skinny_qmm(given.x[0], weight, bits)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", dspark.WINDOW)
@pytest.mark.parametrize("rows", ROWS)
def test_products_are_those_of_float64_and_race_free(
    rows: int, bits: int, shape: tuple[int, int], record: Record
) -> None:
    given = operands(rows, *shape, bits)
    error = given.error(compute(given, bits))
    record(f"mlx-dspark skinny_qmm {bits} bits", mx.bfloat16, error)
    assert error <= TOLERANCE[mx.bfloat16]


@pytest.mark.parametrize("bits", dspark.WINDOW)
def test_a_row_is_the_same_among_others(bits: int) -> None:
    """As its authors say; in one geometry, which follows from n and the tiles."""
    given = operands(16, 4104, 128, bits)
    whole = np.array(compute(given, bits).astype(mx.float32))
    for rows in (9, 13):
        some = Operands(given.x[:, :rows], given.weight, given.expected[:, :rows])
        alone = np.array(compute(some, bits).astype(mx.float32))
        np.testing.assert_array_equal(alone, whole[:rows])


@pytest.mark.parametrize("bits", dspark.WINDOW)
def test_float16_is_read_as_bfloat16(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So mlx-dspark leaves float16 to MLX, and benchmarks translate one function."""
    given = operands(8, 72, 320, bits)
    x = given.x[0].astype(mx.float16)
    weight = [array[0] for array in given.weight.values()]
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_emulator.metal_kernel)
    theirs = dspark.module("skinny_qmm").qmm(x, *weight, bits)
    assert given.error(theirs) > 0.5
    ours = dspark.skinny_qmm(x, weight, bits)
    assert given.error(ours) <= TOLERANCE[mx.bfloat16]


def test_a_missing_barrier_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(8, 72, 320, 4)
    module = dspark.module("skinny_qmm")
    planted = module._SRC.replace(dspark.BARRIER, "")
    assert planted != module._SRC
    monkeypatch.setattr(module, "_SRC", planted)
    with pytest.raises(metal_emulator.EmulatorError, match="never written"):
        compute(given, 4)
