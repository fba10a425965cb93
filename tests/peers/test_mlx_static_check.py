"""MLX's shipped kernels, which Apple compiles, pass the static check as they stand."""

from collections.abc import Mapping

import pytest

from metal_emulator import CompileError, check_text
from peers import mlx_headers

pytestmark = pytest.mark.peer

FLAT = {
    "qmv_quad": "{group}, {bits}, 128, false",
    "qmv_fast": "{group}, {bits}, false",
    "qmv": "{group}, {bits}, true",
    "qmv_wide": "{group}, {bits}, 4, 8, false",
    "qvm": "{group}, {bits}, false",
    "qvm_split_k": "{group}, {bits}",
    "qmm_t": "{group}, {bits}, false, false",
    "qmm_t_splitk": "{group}, {bits}, true",
    "qmm_n": "{group}, {bits}, false",
    "gather_qmv_fast": "{group}, {bits}",
    "gather_qmv": "{group}, {bits}",
    "gather_qvm": "{group}, {bits}",
    "gather_qmm_t": "{group}, {bits}, true",
    "gather_qmm_n": "{group}, {bits}",
    "gather_qmm_rhs": "{group}, {bits}, 16, 32, 32, 1, 2, true",
    "quantize": "{group}, {bits}, false",
    "dequantize": "{group}, {bits}, false",
}
"""Quantized kernels, with their template arguments behind the element type."""

OTHERS = {
    "steel/gemm/kernels/steel_gemm_fused.h": (
        "gemm<{T}, 64, 64, 16, 2, 2, false, true, float>",
        "gemm<{T}, 32, 64, 16, 1, 2, true, false, float>",
    ),
    "steel/gemm/kernels/steel_gemm_splitk.h": (
        "gemm_splitk<{T}, float, 32, 32, 16, 2, 2, false, true, true, false>",
        "gemm_splitk_accum<float, {T}>",
    ),
    "sdpa_vector.h": (
        "sdpa_vector<{T}, 64>",
        "sdpa_vector_2pass_1<{T}, 128>",
        "sdpa_vector_2pass_2<{T}, 128>",
    ),
    "softmax.h": ("softmax_single_row<{T}, float>", "softmax_looped<{T}>"),
    "logsumexp.h": ("logsumexp<{T}>", "logsumexp_looped<{T}>"),
    "gemv.h": ("gemv_wide<{T}, 4, 8>",),
    "gated_delta_update.h": (),
    "sort.h": (),
}
"""Other kernels by header, with their template arguments."""

TYPES = ("half", "bfloat", "float")


def instances(prefix: str, formats: Mapping[int, int]) -> list[str]:
    """Every quantized kernel of a header, for group sizes by bits."""
    return [
        f"{prefix}_{kernel}<{element}, {arguments.format(group=group, bits=bits)}>"
        for kernel, arguments in FLAT.items()
        for bits, group in formats.items()
        for element in TYPES
    ]


def test_the_affine_kernels_pass(affine_header: str) -> None:
    wanted = instances("affine", {4: 64, 8: 32, 3: 128})

    operands = check_text(affine_header, name="quantized.h", instances=wanted)

    assert operands == {("float", "float", "float", "float")}


def test_the_floating_point_kernels_pass(fp_header: str) -> None:
    wanted = instances("fp", {4: 32, 8: 32})

    check_text(fp_header, name="fp_quantized.h", instances=wanted)


@pytest.mark.parametrize("header", OTHERS)
def test_other_kernels_pass(header: str) -> None:
    before = ("steel/gemm/gemm.h",) if "steel/gemm" in header else ()
    text = mlx_headers.flattened(*before, header)
    wanted = [
        template.format(T=element) for element in TYPES for template in OTHERS[header]
    ]

    check_text(text, name=header, instances=wanted)


def test_attention_is_the_known_false_alarm() -> None:
    # Clang has no vec<bool, N> in this mode, and adds no object to a pointer.
    text = mlx_headers.flattened("steel/attn/kernels/steel_attention.h")

    with pytest.raises(CompileError) as caught:
        check_text(text, instances=["attention<half, 32, 16, 128, 128, 4, 1, bool>"])

    assert "invalid vector element type 'bool'" in str(caught.value)
    assert "invalid operands to binary expression" in str(caught.value)
