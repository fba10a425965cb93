"""MLX's quantized kernels in trace mode: silent, but for what MLX does on purpose.

The known reports are not false: the accesses are there, and formally wrong. They do no
harm, which is why MLX's users never see them.
"""

import pytest

import metal_emulator
from peers import mlx_geometry
from peers.mlx_products import TOLERANCE, Operands, Product, every_kernel

pytestmark = pytest.mark.peer

TWICE = "race between threads .* write after write"
"""The last rows of a ragged n belong to two simdgroups: both store the same values."""
BEHIND = "read outside buffer 'scales"
"""Rows that do not exist have their scales read; what they give is not stored."""
KNOWN = {"qmv": TWICE, "gather_qmv": TWICE, "qmv_quad": BEHIND}
"""What is reported where n is more than a threadgroup's rows, but no multiple."""

PRODUCTS = {str(product): product for product in every_kernel()}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_traced_kernel_reports_what_is_known_and_no_more(
    name: str, request: pytest.FixtureRequest
) -> None:
    product: Product = PRODUCTS[name]
    operands = Operands.of(product)
    header = request.getfixturevalue(f"{product.family}_header")
    ragged = product.n > 8 and product.n % 8
    known = KNOWN.get(product.kernel) if ragged else None

    with metal_emulator.emulated(trace=True):
        if known is None:
            y = mlx_geometry.compute(product, operands, header)
            assert operands.error(y) <= TOLERANCE[product.dtype]
        else:
            with pytest.raises(metal_emulator.EmulatorError, match=known):
                mlx_geometry.compute(product, operands, header)
