"""Tensors over memory: slices, what lies outside of them, loads and stores."""

import mlx.core as mx
import numpy as np
import pytest

import metal_emulator
from support.marks import needs_emulator

pytestmark = needs_emulator

HEADER = """
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using Extents = metal::dextents<int32_t, 2>;
template <typename T>
using Matrix = metal::tensor<T, Extents, metal::tensor_inline>;
"""
OPERATION = """
int M = size[0], N = size[1], K = size[2];
constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
    16, 32, 64, false, false, true,
    mpp::tensor_ops::matmul2d_descriptor::mode::multiply);
mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroup> operation;
Matrix<device half> left((device half*)a, Extents(K, M));
Matrix<device half> right((device half*)b, Extents(N, K + size[3]));
Matrix<device float> result(y, Extents(N, M), metal::array<int32_t, 2>{1, N});
auto destination = operation.template get_destination_cooperative_tensor<
    Matrix<device half>, Matrix<device half>, float>();
"""
PRODUCT = f"""{OPERATION}
if (size[4]) {{
  auto registers =
      operation.template get_left_input_cooperative_tensor<half, half, float>();
  registers.load(left);
  operation.run(registers, right, destination);
}} else {{
  operation.run(left, right, destination);
}}
destination.store(result);
"""
SIZE = (16, 32, 64)


def run(
    body: str, m: int, n: int, k: int, more: int = 0, registers: bool = False
) -> mx.array:
    """Runs a body on a [m, k] and b [k, n], which it takes for [k + more, n]."""
    a, b = operands(m, n, k)
    kernel = metal_emulator.metal_kernel(
        "memory", ["a", "b", "size"], ["y"], body, HEADER
    )
    (y,) = kernel(
        inputs=[a, b, mx.array([m, n, k, more, registers])],
        output_shapes=[(m, n)],
        output_dtypes=[mx.float32],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        init_value=-1,
    )
    return y


def operands(m: int, n: int, k: int) -> tuple[mx.array, mx.array]:
    """Returns small integers, whose products are exact."""
    keys = mx.random.split(mx.random.key(0))
    a = mx.random.randint(-8, 8, (m, k), key=keys[0])
    b = mx.random.randint(-8, 8, (k, n), key=keys[1])
    return a.astype(mx.float16), b.astype(mx.float16)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("size", [SIZE, (11, 9, 37)])
def test_sizes_clip_the_operation(
    size: tuple[int, int, int], registers: bool, traced: bool
) -> None:
    with metal_emulator.emulated(trace=traced):
        y = run(PRODUCT, *size, registers=registers)
    a, b = (np.array(each, np.float32) for each in operands(*size))
    np.testing.assert_array_equal(np.array(y), a @ b)


def test_slices_begin_and_end_where_they_say() -> None:
    body = (
        OPERATION
        + """
    auto some = left.template slice<48, 8>(16, 3);
    constexpr int all = metal::dynamic_extent;
    auto rest = right.template slice<all, all>(5, 16);
    operation.run(some, rest, destination);
    auto target = result.template slice<7, 16>(2, 1);
    destination.store(target);
    """
    )
    y = np.array(run(body, *SIZE))
    a, b = (np.array(each, np.float32) for each in operands(*SIZE))
    expected = np.full((16, 32), -1, np.float32)
    product = np.zeros((16, 7), np.float32)
    product[:8] = a[3:11, 16:] @ b[16:, 5:12]
    expected[1:, 2:9] = product[:15]
    np.testing.assert_array_equal(y, expected)


def test_size_beyond_the_memory_is_reported() -> None:
    with (
        metal_emulator.emulated(trace=True),
        pytest.raises(metal_emulator.EmulatorError, match="read outside buffer 'b'"),
    ):
        run(PRODUCT, 16, 32, 63, more=1)


def test_dynamic_k_is_refused() -> None:
    body = PRODUCT.replace("16, 32, 64,", "16, 32, metal::dynamic_extent,")
    with pytest.raises(metal_emulator.CompileError, match="emulated for a fixed k"):
        run(body, *SIZE)
