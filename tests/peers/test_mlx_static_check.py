"""MLX's shipped kernels, which Apple compiles, pass the static check as they stand."""

from collections.abc import Callable, Mapping

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
NAX = {
    "quantized_nax.h": (
        "affine_qmm_t_nax<{T}, 64, 4, false, true, 64, 64, 64, 2, 2>",
        "affine_qmm_n_nax<{T}, 32, 8, true, 64, 64, 64, 2, 2>",
        "affine_gather_qmm_t_nax<{T}, 128, 3, true, 32, 64, 64, 2, 2>",
    ),
    "fp_quantized_nax.h": (
        "fp_qmm_t_nax<{T}, 32, 4, false, true, 64, 64, 64, 2, 2>",
        "fp_qmm_t_nax<{T}, 16, 4, true, false, 32, 64, 64, 2, 2, true>",
    ),
    "steel/gemm/kernels/steel_gemm_fused_nax.h": (
        "gemm<{T}, 64, 64, 256, 2, 2, false, true>",
        "gemm<{T}, 64, 64, 256, 2, 2, true, false>",
    ),
    "steel/gemm/kernels/steel_gemm_thin_nax.h": (
        "gemm_thin_nax<{T}, 2, 2, 1, 1, 4, true>",
        "gemm_thin_nax<{T}, 2, 2, 1, 1, 2, false>",
    ),
}
"""Kernels for the tensor units of the M5 likewise."""

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


def text_of(header: str) -> str:
    """Returns a header with what it needs before it."""
    gemm = "steel/gemm/gemm_nax.h" if header in NAX else "steel/gemm/gemm.h"
    before = (gemm,) if header in NAX or "steel/gemm" in header else ()
    quantized = ("quantized_utils.h",) if "quantized" in header else ()
    return mlx_headers.flattened(*before, *quantized, header)


@pytest.mark.parametrize("header", [*OTHERS, *NAX])
def test_other_kernels_pass(header: str) -> None:
    templates = (OTHERS | NAX)[header]
    wanted = [each.format(T=element) for element in TYPES for each in templates]

    system = {"macos": "26.2"} if header in NAX else {}
    check_text(text_of(header), name=header, instances=wanted, **system)


@pytest.mark.parametrize("macos", ["15.6", "26.1"])
def test_tensor_operations_need_macos_26_2(macos: str) -> None:
    wanted = [NAX["quantized_nax.h"][0].format(T="half")]
    with pytest.raises(CompileError, match=r"needs Metal 4\.0 and macOS 26\.2"):
        check_text(text_of("quantized_nax.h"), instances=wanted, macos=macos)


@pytest.mark.parametrize("family", ["affine", "fp"])
def test_gather_qmm_rhs_nax_is_the_known_false_alarm(
    family: str, header_of: Callable[[str], str]
) -> None:
    # Clang takes no object that converts to an integer as the index of a vector.
    kernel = f"{family}_gather_qmm_rhs_nax<half, 32, 8, 64, 64, 64, 2, 2, true>"
    with pytest.raises(CompileError, match="does not provide a subscript operator"):
        check_text(header_of(f"{family}_nax"), instances=[kernel])


def test_attention_with_tensor_units_passes(attention_nax_header: str) -> None:
    wanted = ["attention_nax<half, 64, 32, 64, 64, 4, 1>"]
    check_text(attention_nax_header, instances=wanted)


def test_attention_is_the_known_false_alarm() -> None:
    # Clang has no vec<bool, N> in this mode, and adds no object to a pointer.
    text = mlx_headers.flattened("steel/attn/kernels/steel_attention.h")

    with pytest.raises(CompileError) as caught:
        check_text(text, instances=["attention<half, 32, 16, 128, 128, 4, 1, bool>"])

    assert "invalid vector element type 'bool'" in str(caught.value)
    assert "invalid operands to binary expression" in str(caught.value)
