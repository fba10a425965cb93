"""A kernel with one matmul2d, for the tests of tensor operations."""

from dataclasses import dataclass

import mlx.core as mx

import metal_emulator

HEADER = """
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using Descriptor = mpp::tensor_ops::matmul2d_descriptor;
"""

OPERATION = """
constexpr auto descriptor = Descriptor(
    M, N, K, TL, TR, RELAXED,
    ADD ? Descriptor::mode::multiply_accumulate : Descriptor::mode::multiply);
mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroup> operation;
auto left = operation.template get_left_input_cooperative_tensor<T, T, float>();
auto right = operation.template get_right_input_cooperative_tensor<T, T, float>();
auto destination = operation.template get_destination_cooperative_tensor<
    metal::remove_addrspace_t<decltype(left)>,
    metal::remove_addrspace_t<decltype(right)>, float>();
"""
"""Declares `operation`, `left`, `right` and `destination`."""

LOADS = """
for (ushort i = 0; i < left.get_capacity(); ++i) {
  auto at = left.get_multidimensional_index(i);
  left[i] = a[at[1] * (TL ? M : K) + at[0]];
}
for (ushort i = 0; i < right.get_capacity(); ++i) {
  auto at = right.get_multidimensional_index(i);
  right[i] = b[at[1] * (TR ? K : N) + at[0]];
}
for (ushort i = 0; i < destination.get_capacity(); ++i) {
  auto at = destination.get_multidimensional_index(i);
  destination[i] = c[at[1] * N + at[0]];
}
"""

RUN = "operation.run(left, right, destination);"

STORES = """
for (ushort i = 0; i < destination.get_capacity(); ++i) {
  auto at = destination.get_multidimensional_index(i);
  y[at[1] * N + at[0]] = destination[i];
}
"""


@dataclass(frozen=True)
class Matmul:
    """One operation of 32 lanes."""

    m: int  # Rows of the result
    n: int  # Columns of the result
    k: int  # Inner dimension
    transpose_left: bool = False  # Whether the left operand is stored as [k, m]
    transpose_right: bool = False  # Whether the right operand is stored as [n, k]
    relaxed: bool = True  # Whether float operands may lose bits
    mode: str = "multiply_accumulate"  # "multiply_accumulate" or "multiply"

    def stored(self, operand: str) -> tuple[int, int]:
        """Returns rows and columns of an operand in memory."""
        if operand == "left":
            return (self.k, self.m) if self.transpose_left else (self.m, self.k)
        if operand == "right":
            return (self.n, self.k) if self.transpose_right else (self.k, self.n)
        return self.m, self.n

    def template(self, dtype: mx.Dtype) -> list[tuple[str, object]]:
        """Returns the template arguments of `OPERATION`."""
        return [
            ("T", dtype),
            *zip("MNK", (self.m, self.n, self.k), strict=True),
            ("TL", self.transpose_left),
            ("TR", self.transpose_right),
            ("RELAXED", self.relaxed),
            ("ADD", self.mode == "multiply_accumulate"),
        ]

    def run(
        self,
        a: mx.array,
        b: mx.array,
        c: mx.array,
        body: str = OPERATION + LOADS + RUN + STORES,
        lanes: int = 32,
    ) -> mx.array:
        """Runs a body on a, b and c and returns y [m, n] in float32."""
        kernel = metal_emulator.metal_kernel(
            "tensors", ["a", "b", "c"], ["y"], body, HEADER
        )
        (y,) = kernel(
            inputs=[a, b, c],
            output_shapes=[(self.m, self.n)],
            output_dtypes=[mx.float32],
            template=self.template(a.dtype),
            grid=(lanes, 1, 1),
            threadgroup=(lanes, 1, 1),
        )
        return y
