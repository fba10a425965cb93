"""MLX's quantized kernels, unmodified, on the emulator, most of them traced.

The known reports are not false: the accesses are there, and formally wrong. They do no
harm, which is why MLX's users never see them.
"""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import metal_emulator
from peers import mlx_geometry
from peers.foreign import reports
from peers.mlx_products import (
    FORMATS,
    TOLERANCE,
    Operands,
    Product,
    Record,
    batches,
    every_format,
    every_kernel,
)

pytestmark = pytest.mark.peer

TWICE = "race between threads .* write after write"
"""The last rows of a ragged n belong to two simdgroups: both store the same values."""
BEHIND = "read outside buffer 'scales"
"""Rows that do not exist have their scales read; what they give is not stored."""
KNOWN = {"qmv": TWICE, "gather_qmv": TWICE, "qmv_quad": BEHIND}
"""What is reported where n is more than a threadgroup's rows, but no multiple."""
TRACED = (*every_kernel(),)


@pytest.mark.parametrize("product", [*TRACED, *every_format(), *batches()], ids=str)
def test_a_kernel_computes_the_product_and_its_trace_reports_what_is_known(
    product: Product, header_of: Callable[[str], str], record: Record
) -> None:
    header = header_of(product.family)
    traced = product in TRACED
    ragged = product.n > 8 and product.n % 8
    known = KNOWN.get(product.kernel) if traced and ragged else None
    if known is not None:
        with reports(known):
            mlx_geometry.error_of(product, header)
    elif traced:
        with metal_emulator.emulated(trace=True):
            assert mlx_geometry.error_of(product, header) <= TOLERANCE[product.dtype]

    error = mlx_geometry.error_of(product, header)

    record(f"{product.mode} {product.kernel}", product.dtype, error)
    assert error <= TOLERANCE[product.dtype]


@pytest.mark.parametrize("kernel", ["qmm_t", "qmm_n"])
@pytest.mark.parametrize("mode", FORMATS)
def test_the_reference_is_what_mlx_computes(mode: str, kernel: str) -> None:
    product = Product(kernel=kernel, mode=mode, dtype=mx.float32, m=19, n=64, k=96)
    product = replace(product, k=128) if product.transposed else product
    operands = Operands.of(product)
    group, bits = product.format
    stock = mx.quantized_matmul(
        operands.x,
        *operands.weight.values(),
        transpose=product.transposed,
        group_size=group,
        bits=bits,
        mode=mode,
    )
    assert operands.error(stock) < 3e-6


@pytest.mark.parametrize("mode", ["affine", "nvfp4"])
def test_the_order_of_threadgroups_does_not_matter(
    mode: str, header_of: Callable[[str], str]
) -> None:
    product = Product(
        kernel="gather_qmm_t", mode=mode, dtype=mx.float16, m=35, n=70, k=192
    )
    operands = Operands.of(product)
    results = []
    for seed, workers in ((0, 1), (1, 2), (7, 2)):
        with metal_emulator.emulated(seed=seed, workers=workers):
            y = mlx_geometry.compute(product, operands, header_of(product.family))
            results.append(np.array(y))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
