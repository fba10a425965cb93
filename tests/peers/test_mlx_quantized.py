"""MLX's quantized kernels, unmodified, on the emulator."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import metal_emulator
from peers import mlx_geometry
from peers.mlx_products import (
    FORMATS,
    TOLERANCE,
    Operands,
    Product,
    batches,
    every_format,
    every_kernel,
)

pytestmark = pytest.mark.peer


@pytest.mark.parametrize(
    "product", [*every_kernel(), *every_format(), *batches()], ids=str
)
def test_kernel_computes_the_product(
    product: Product,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    operands = Operands.of(product)
    header = request.getfixturevalue(f"{product.family}_header")
    y = mlx_geometry.compute(product, operands, header)
    error = operands.error(y)
    record_property("kernel", f"{product.mode} {product.kernel}")
    record_property("dtype", str(product.dtype).split(".")[-1])
    record_property("error", error)
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
    mode: str, request: pytest.FixtureRequest
) -> None:
    product = Product(
        kernel="gather_qmm_t", mode=mode, dtype=mx.float16, m=35, n=70, k=192
    )
    operands = Operands.of(product)
    header = request.getfixturevalue(f"{product.family}_header")
    results = []
    for seed, workers in ((0, 1), (1, 2), (7, 2)):
        with metal_emulator.emulated(seed=seed, workers=workers):
            results.append(np.array(mlx_geometry.compute(product, operands, header)))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
