"""What the emulator reports in MLX's kernels: reads past the end, and their harm.

Each is a read that a test on a GPU does not see, because the bytes behind an array
belong to something harmless. A release of MLX that mends one fails its test here.
"""

import mlx.core as mx
import pytest

import metal_emulator
from peers import mlx_geometry
from peers.mlx_products import Operands, Product

pytestmark = pytest.mark.peer

QUAD = Product(kernel="qmv_quad", mode="mxfp4", dtype=mx.float16, m=3, n=37, k=128)
TAIL = Product(kernel="qmm_t", mode="nvfp4", dtype=mx.float16, m=32, n=32, k=272)
"""k is 16 more than a multiple of 32: half of the last tile is behind the row."""

OUTSIDE = "read outside buffer"


def padded(operands: Operands, name: str, rows: int, byte: int = 0) -> Operands:
    """With so many more rows of that byte behind an array of the weight."""
    array = operands.weight[name]
    item = byte * (0x01010101 if array.dtype == mx.uint32 else 1)
    more = mx.full((1, rows, array.shape[-1]), item, dtype=array.dtype)
    longer = mx.concatenate([array, more], axis=1)
    weight = {**operands.weight, name: longer}
    return Operands(operands.x, weight, operands.expected)


def test_fp_qmv_quad_reads_scales_of_rows_that_do_not_exist_and_makes_no_use_of_them(
    fp_header: str,
) -> None:
    with pytest.raises(metal_emulator.EmulatorError, match=f"{OUTSIDE} 'scales"):
        mlx_geometry.error_of(QUAD, fp_header)
    operands = padded(Operands.of(QUAD), "scales", 64 - QUAD.n, byte=0xFF)
    assert operands.error(mlx_geometry.compute(QUAD, operands, fp_header)) < 1e-3


@pytest.mark.parametrize(("name", "other"), [("w", "scales"), ("scales", "w")])
def test_nvfp4_qmm_t_reads_behind_the_last_row(
    name: str, other: str, fp_header: str
) -> None:
    operands = padded(Operands.of(TAIL), other, 1)
    with pytest.raises(metal_emulator.EmulatorError, match=f"{OUTSIDE} '{name}_"):
        mlx_geometry.compute(TAIL, operands, fp_header)


@pytest.mark.parametrize(
    ("behind", "spoilt"), [(0x38, False), (0x7F, True), (0xFF, True)]
)
def test_nvfp4_qmm_t_is_nan_in_its_last_column_if_that_scale_is(
    fp_header: str, behind: int, spoilt: bool
) -> None:
    operands = padded(padded(Operands.of(TAIL), "w", 1), "scales", 1, byte=behind)
    y = mlx_geometry.compute(TAIL, operands, fp_header)[0]
    assert mx.isnan(y).any(axis=0).tolist() == [False] * 31 + [spoilt]
    if not spoilt:
        assert operands.error(y) < 1e-3
