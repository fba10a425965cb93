"""Our shaders use of Metal what MLX's own shipped kernels use: Apple compiles that."""

import json
import re
from importlib import metadata
from pathlib import Path

import pytest

from metal_emulator.language.tokens import Tokens
from metal_emulator.static.text import _methods
from mlx_marlin.backends.metal import source
from support import matmul2d
from support.marks import needs_emulator
from support.metal_vocabulary import used, used_tensors

pytestmark = needs_emulator

MLX = json.loads((Path(__file__).parents[1] / "data" / "mlx_builtins.json").read_text())

ALIAS = "Metal's own alias of vec<T, N>, which MLX spells out (MSL specification, 2.2)"
PACKED = (
    "only packed vectors are aligned as their elements are (MSL specification, 2.2.3): "
    "arrays of MLX may start at any element"
)
OCTET = "Metal's own name of uint8_t, which MLX spells out (MSL specification, 2.1)"
REVIEWED = {
    **dict.fromkeys(("char4", "uchar4", "ushort2", "ushort4", "uint4"), ALIAS),
    **dict.fromkeys(("half2", "half4"), ALIAS),
    **dict.fromkeys(("packed_uchar4", "packed_ushort2", "packed_ushort4"), PACKED),
    **dict.fromkeys(("packed_uint2", "packed_uint3", "packed_uint4"), PACKED),
    **dict.fromkeys(("packed_half4", "packed_float4"), PACKED),
    "uchar": OCTET,
}
"""What MLX's kernels do not use, and why ours may."""

REVIEWED_TENSORS = {
    "is_valid_element": "probed on an M5 by public projects; all elements of a shape "
    "of two cooperative operands are valid"
}
"""The same for tensor operations."""

TEXTS = {
    text.name: text.header + text.source
    for text in (
        *map(source.kernel_source, source.BODIES),
        *(
            source.kernel_source(kernel, atomic=True)
            for kernel in ("gemv", "gemm_register", "gemm_staged", "gemm_tensor")
        ),
    )
}


@pytest.mark.parametrize("kernel", TEXTS)
def test_a_kernel_uses_what_mlx_uses_or_what_was_reviewed(kernel: str) -> None:
    assert used(TEXTS[kernel]) - {*MLX["names"]} - {*REVIEWED} == set()
    assert used_tensors(TEXTS[kernel]) <= {*MLX["tensor_names"], *REVIEWED_TENSORS}


@pytest.mark.parametrize("kernel", TEXTS)
def test_members_say_where_their_object_is(kernel: str) -> None:
    """Metal 4.1 takes the space of `this` for generic where nothing is said."""
    tokens = Tokens(TEXTS[kernel])

    assert [tokens.text(tokens.before(last)) for last in _methods(tokens)] == []


@pytest.mark.parametrize("kernel", TEXTS)
def test_angles_of_any_size_are_precise(kernel: str) -> None:
    calls = re.findall(r"[\w:]*\b(?:sin|cos|sincos|tan)\(", TEXTS[kernel])

    assert {*calls} <= {"metal::precise::sin(", "metal::precise::cos("}
    assert bool(calls) == (kernel == "marlin_rotate_heads")


def test_mlx_uses_the_tensor_operations_that_are_emulated() -> None:
    text = Path(matmul2d.__file__).read_text()
    found = used_tensors(text)
    assert {"matmul2d", "execution_simdgroup", "get_capacity"} <= found
    assert found <= {*MLX["tensor_names"], *REVIEWED_TENSORS}


def test_nothing_was_reviewed_in_vain() -> None:
    ours = set[str]().union(*map(used, TEXTS.values()))

    assert {*REVIEWED} <= ours
    assert {*REVIEWED} & {*MLX["names"]} == set()
    tensors = set[str]().union(*map(used_tensors, TEXTS.values()))
    assert {*REVIEWED_TENSORS} <= tensors
    assert {*REVIEWED_TENSORS} & {*MLX["tensor_names"]} == set()


def test_the_list_is_of_the_pinned_mlx() -> None:
    # After a change of the pin: python tests/list_mlx_builtins.py
    assert MLX["mlx"] == metadata.version("mlx")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("x = simd_ballot(true);", {"simd_ballot"}),
        ("simd_vote v; v.any();", {"simd_vote", "any"}),
        ("m.thread_elements() = as_type<int>(f);", {"thread_elements", "as_type"}),
        ("auto p = (packed_char4)q;", {"packed_char4"}),
        ("f(mem_flags::mem_texture);", {"mem_flags", "mem_texture"}),
        ("#pragma clang loop unroll_count(4)\n", {"clang loop unroll_count(4)"}),
        ('_Pragma("clang loop vectorize(enable)")', {"clang loop vectorize(enable)"}),
        ("y[threads_per_grid.x] = M_PI_F;", {"threads_per_grid", "M_PI_F"}),
        # Not Metal's: a variable, a member, a comment, a text.
        ("step = 3 < 4; a.half4; a.min; /* exp(x) */ // log(x)\n", set()),
    ],
)  # fmt: skip
def test_the_names_of_metal_are_found_in_a_text(text: str, names: set[str]) -> None:
    assert used(text) == names
