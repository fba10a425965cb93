"""MLX's kernels for tensor units pass the static check as they stand."""

import pytest

from metal_emulator import CompileError, check_text
from peers import mlx_headers

pytestmark = pytest.mark.peer

TYPES = ("half", "bfloat", "float")
GEMM = "steel/gemm/gemm_nax.h"
KERNELS = {
    "affine": (
        (GEMM, "quantized_utils.h", "quantized_nax.h"),
        (
            "affine_qmm_t_nax<{T}, 64, 4, false, true, 64, 64, 64, 2, 2>",
            "affine_qmm_n_nax<{T}, 32, 8, true, 64, 64, 64, 2, 2>",
            "affine_gather_qmm_t_nax<{T}, 128, 3, true, 32, 64, 64, 2, 2>",
        ),
    ),
    "fp": (
        (GEMM, "quantized_utils.h", "fp_quantized_nax.h"),
        (
            "fp_qmm_t_nax<{T}, 32, 4, false, true, 64, 64, 64, 2, 2>",
            "fp_qmm_t_nax<{T}, 16, 4, true, false, 32, 64, 64, 2, 2, true>",
        ),
    ),
    "gemm": (
        (GEMM, "steel/gemm/kernels/steel_gemm_fused_nax.h"),
        (
            "gemm<{T}, 64, 64, 256, 2, 2, false, true>",
            "gemm<{T}, 64, 64, 256, 2, 2, true, false>",
        ),
    ),
    "thin": (
        (GEMM, "steel/gemm/kernels/steel_gemm_thin_nax.h"),
        (
            "gemm_thin_nax<{T}, 2, 2, 1, 1, 4, true>",
            "gemm_thin_nax<{T}, 2, 2, 1, 1, 2, false>",
        ),
    ),
}
"""Headers and instances of each family."""


def text_of(family: str) -> str:
    return mlx_headers.flattened(*KERNELS[family][0])


@pytest.mark.parametrize("family", KERNELS)
def test_kernels_pass(family: str) -> None:
    wanted = [
        template.format(T=element)
        for element in TYPES
        for template in KERNELS[family][1]
    ]
    check_text(text_of(family), instances=wanted, macos="26.2")


@pytest.mark.parametrize("macos", ["15.6", "26.1"])
def test_they_need_macos_26_2(macos: str) -> None:
    wanted = [KERNELS["affine"][1][0].format(T="half")]
    with pytest.raises(CompileError, match=r"needs Metal 4\.0 and macOS 26\.2"):
        check_text(text_of("affine"), instances=wanted, macos=macos)


@pytest.mark.parametrize("family", ["affine", "fp"])
def test_gather_qmm_rhs_is_the_known_false_alarm(family: str) -> None:
    # Clang takes no object that converts to an integer as the index of a vector.
    kernel = f"{family}_gather_qmm_rhs_nax<half, 32, 8, 64, 64, 64, 2, 2, true>"
    with pytest.raises(CompileError, match="does not provide a subscript operator"):
        check_text(text_of(family), instances=[kernel])


def test_attention_passes(attention_nax_header: str) -> None:
    wanted = ["attention_nax<half, 64, 32, 64, 64, 4, 1>"]
    check_text(attention_nax_header, instances=wanted)
