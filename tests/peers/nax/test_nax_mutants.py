"""Errors planted in MLX's kernels for tensor units, and what finds each."""

from dataclasses import dataclass

import mlx.core as mx
import pytest

import metal_emulator
from peers import mlx_geometry
from peers.mlx_products import Product
from peers.nax.nax_products import TOLERANCE

pytestmark = pytest.mark.peer

PRODUCT = Product(
    kernel="qmm_t_nax", mode="affine", dtype=mx.float16, m=64, n=64, k=128
)
KERNEL = "METAL_FUNC void qmm_t_nax_tgp_impl("
"""Mutants of the kernel itself begin their search here."""
MMA = "METAL_FUNC static constexpr void mma("


@dataclass(frozen=True)
class Mutant:
    """One replacement."""

    start: str  # The first occurrence of `before` behind this text is replaced
    before: str  # What MLX has
    after: str  # What is wrong
    report: str = ""  # What the emulator reports; "" if only the result is wrong
    traced: bool = False  # Whether it takes trace mode to find it

    def planted(self, header: str) -> str:
        """Returns the header with the error."""
        begin = header.index(self.before, header.index(self.start))
        return header[:begin] + self.after + header[begin + len(self.before) :]


MATMAD = "          tile_matmad_nax("
MUTANTS = {
    "halves of the right operand swapped": Mutant(
        MMA,
        "ct_b[i] = Bn0[i];\n      ct_b[kElemsPerFrag + i] = Bn1[i];",
        "ct_b[i] = Bn1[i];\n      ct_b[kElemsPerFrag + i] = Bn0[i];",
    ),
    "halves of the result swapped": Mutant(
        MMA,
        "Cn0[i] = ct_c[i];\n      Cn1[i] = ct_c[kElemsPerFrag + i];",
        "Cn1[i] = ct_c[i];\n      Cn0[i] = ct_c[kElemsPerFrag + i];",
    ),
    "columns of a fragment in another order": Mutant(
        "METAL_FUNC static short2 get_coord() {",
        "((qid & 2) | (simd_lane_id & 1)) * 4",
        "((qid & 2) / 2 | (simd_lane_id & 1) * 2) * 4",
    ),
    "fragments of the right operand n first": Mutant(
        "if constexpr (TN % 2 == 0)",
        "B.frag_at(kk, nn + 1, tb)",
        "B.frag_at(nn + 1, kk, tb)",
    ),
    "right operand not transposed": Mutant(
        MMA, "transpose_b,\n        true", "!transpose_b,\n        true"
    ),
    "multiply for multiply_accumulate": Mutant(
        MMA, "mode::multiply_accumulate", "mode::multiply"
    ),
    "same k of x in every step": Mutant(KERNEL, "x + kk1, K", "x, K"),
    "no product in one simdgroup": Mutant(
        KERNEL, MATMAD, "if (simd_gid != 3)\n" + MATMAD
    ),
    "no product in one lane": Mutant(
        KERNEL,
        MATMAD,
        "if (simd_lid != 31)\n" + MATMAD,
        r"matmul2d\(16,32,16\) with missing lanes in simdgroup",
    ),
    "left operand one fragment too far": Mutant(
        MMA,
        "ct_a[i] = A[i]",
        "ct_a[kElemsPerFrag + i] = A[i]",
        "holds 8 elements of the left operand, the kernel uses element 8",
    ),
    "accumulators not loaded": Mutant(
        MMA,
        "ct_c[i] = Cn0[i];\n",
        "",
        "reads the destination, of which the kernel has never set element 0",
    ),
    "k twice as deep as what is loaded": Mutant(
        MMA,
        "32,\n        16,",
        "32,\n        32,",
        "reads the left operand, of which the kernel has never set element 8",
    ),
    "accumulators not cleared": Mutant(
        KERNEL, "Dtile.clear();", "", "never set", traced=True
    ),
    "no barrier before the weights are read": Mutant(
        "loader_w.load_safe(short2(BK, tgp_bn));",
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
        "race between threads on byte|value that was never written",
        traced=True,
    ),
    "barrier that orders nothing": Mutant(
        "for (int k = 0; k < K; k += BK) {",
        "mem_flags::mem_threadgroup",
        "mem_flags::mem_none",
        "race between threads on byte",
        traced=True,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_error_is_found(name: str, affine_nax_header: str) -> None:
    mutant = MUTANTS[name]
    header = mutant.planted(affine_nax_header)
    with metal_emulator.emulated(trace=mutant.traced):
        if mutant.report:
            with pytest.raises(metal_emulator.EmulatorError, match=mutant.report):
                mlx_geometry.error_of(PRODUCT, header)
        else:
            error = mlx_geometry.error_of(PRODUCT, header)
            assert error > 100 * TOLERANCE[PRODUCT.dtype]


def test_without_an_error_nothing_is_found(affine_nax_header: str) -> None:
    with metal_emulator.emulated(trace=True):
        error = mlx_geometry.error_of(PRODUCT, affine_nax_header)
    assert error <= TOLERANCE[PRODUCT.dtype]
