"""The static check refuses what Metal refuses, by the line, and nothing else."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import metal_emulator
from metal_emulator import CompileError, check, check_text
from metal_emulator.compiling import build, limited
from metal_emulator.static import check as static_check
from metal_emulator.static import messages
from support.marks import needs_emulator
from support.profiles import sampled
from support.rule_mutants import MUTANTS, OBJECT, OF_TILE, Mutant

pytestmark = needs_emulator

CALL: dict[str, Any] = {
    # few: fewer than eight elements, so MLX puts it in constant memory.
    "inputs": [mx.zeros(64), mx.zeros(4)],
    "grid": (32, 1, 1),
    "threadgroup": (32, 1, 1),
    "output_shapes": [(32,)],
    "output_dtypes": [mx.float32],
}
BODY = """uint i = thread_position_in_grid.x;
threadgroup float tile[32];
float v = x[i];
{}
"""
BODY_LINE = 4


TWICE = {
    *("Limits", "Role", "Slice", "atomic", "complex64_t", "dextents", "element_of"),
    *("matmul2d", "matmul2d_descriptor", "matrix", "quad_vote", "remove_addrspace_t"),
    *("simd_vote", "simdgroup_matrix", "tensor"),
}
"""Types whose members differ: with address spaces, and with what runs."""
DECLARED = re.compile(
    r"^(?:(?:struct|class|enum class|enum) (\w+)[^;{]*\{|using (\w+) =)", re.MULTILINE
)


def test_both_builds_declare_a_type_once_unless_its_members_differ() -> None:
    def declared(files: Iterable[Path]) -> set[str]:
        texts = (file.read_text(encoding="utf-8") for file in files)
        return {
            name for text in texts for found in DECLARED.findall(text) for name in found
        } - {""}

    static = {*(build.INCLUDE / "static").rglob("*.h")}
    emulated = {*build.INCLUDE.rglob("*.h")} - static

    assert declared(static) & declared(emulated) == TWICE


def checked(line: str, header: str = "", **changes: Any) -> frozenset[tuple[str, ...]]:
    """Checks a kernel with const device x[64], constant few[4], device out[32]."""
    return check(
        "tested",
        ["x", "few"],
        ["out"],
        BODY.format(line),
        header,
        calls=[CALL | changes],
    )


@pytest.mark.parametrize(
    "said",
    [
        "'float' to 'bfloat' (aka '__bf16')",
        "'__private float' to '__private bfloat' (aka '__private __bf16')",
    ],
    ids=["clang 21", "clang 19"],
)
def test_a_conversion_is_told_alike_whatever_clang_says(said: str) -> None:
    warning = "implicit conversion loses floating-point precision: "
    (diagnostic,) = messages.diagnostics(f"a:1:1: warning: {warning}{said} [-Wx]")

    assert diagnostic.is_metal_error
    assert diagnostic.message == f"{warning}'float' to 'bfloat' (aka 'bfloat')"


@sampled(20)
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_broken_rule_is_named_with_its_line(mutant: Mutant) -> None:
    with pytest.raises(CompileError) as caught:
        checked(mutant.bad, mutant.bad_header)

    message = str(caught.value)
    assert message.startswith("kernel tested breaks Metal's rules:\n  ")
    assert mutant.message in message
    places = [f"at source line {BODY_LINE}: ", "at header line 1: "]
    if mutant.bad_header.count("\n") > 1:
        places.append("at header line 2: ")
    assert any(place in message for place in places)


# What clang's mode, not Metal, would refuse.
ACCEPTED = {
    "temporary by reference": (
        "v = plus(3.0f, v);",
        "float plus(const thread float& a, float b);\n",
    ),
    "struct from constant memory": (
        "Pair p = *(const constant Pair*)few; v = p.a;",
        OBJECT,
    ),
    "method of a temporary": ("v = Pair{v}.get();", OBJECT),
    "qualified constructor": (
        "v = Wrapped(v);",
        "struct Wrapped {\n"
        "  float a;\n"
        "  Wrapped(float f) thread : a(f) {}\n"
        "  operator float() const thread { return a; }\n"
        "};\n",
    ),
    "reference to a pointer": (
        "const device float* p = x; advance(p); v = *p;",
        "METAL_FUNC void advance(const device float*& p) { p += 2; }\n",
    ),
    "array of the library": (
        "v = sizes[1] + sizes.size();",
        "constant metal::array<int, 2> sizes = {1, 2};\n",
    ),
    "OpenCL's words": ("int local = 1, global = 2, generic = 3; v = local;", ""),
    "comparison of vectors": (
        "const float3 w = float3(v); v = any(w > 0.0f) ? w.x : w.zy.y;",
        "",
    ),
    "lambda": ("auto twice = [&](float a) { return 2 * a + v; }; v = twice(v);", ""),
    "products": ("v = float(i) * v; v *= v * few[1] * x[0] * tile[i];", ""),
    "coherent": (
        "v = coherent_sum((coherent(device) device float*)out);",
        "METAL_FUNC float coherent_sum(device float* p) { return p[0]; }\n",
    ),
}


def test_what_metal_accepts_passes() -> None:
    """The good twins of the broken rules too: all are kernels of one text."""
    text = "#include <metal_stdlib>\nusing namespace metal;\n"
    twins = (mutant.twin for mutant in MUTANTS.values())
    for nth, (line, header) in enumerate((*ACCEPTED.values(), *twins)):
        text += f"""
namespace of_{nth} {{
{header}
kernel void accepted(
    const device float* x [[buffer(0)]], const constant float* few [[buffer(1)]],
    device float* out [[buffer(2)]], uint i [[thread_position_in_grid]]) {{
  threadgroup float tile[32];
  float v = x[i];
  {line}
}}
}}
"""
    check_text(text)


def test_a_message_reads_like_this() -> None:
    with pytest.raises(CompileError) as caught:
        checked("v = first<float>(x, 2);", OF_TILE.replace(
            "METAL_FUNC", "template <typename T> METAL_FUNC"
        ).replace("p)", "p, T scale)"))  # fmt: skip

    assert str(caught.value) == (
        "kernel tested breaks Metal's rules:\n"
        "  no matching function for call to 'first'\n"
        "    cannot pass pointer to address space 'device' as a pointer to address "
        "space 'threadgroup' in 1st argument\n"
        "    at source line 4: v = first<float>(x, 2);"
    )


def test_every_fault_is_told_at_once_and_each_once() -> None:
    with pytest.raises(CompileError) as caught:
        checked("double d = 1; float* p = &v; x[0] = v;")

    assert str(caught.value).count("at source line 4") == 3


def test_many_instances_share_one_run_of_clang(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    stock = limited.run
    monkeypatch.setattr(
        limited, "run", lambda *a, **k: (runs.append(a), stock(*a, **k))[1]
    )
    calls = [
        CALL | {"template": [("N", n), ("T", dtype)], "output_dtypes": [dtype]}
        for n in range(1, 20)
        for dtype in (mx.float32, mx.float16, mx.bfloat16)
    ]

    check("many", ["x", "few"], ["out"], BODY.format("out[i] = T(N * v);"), calls=calls)

    assert len(runs) == 1


@pytest.mark.parametrize("bad", ["float, 2", "bfloat, 1"])
def test_one_bad_instance_among_good_ones_is_found_and_named(bad: str) -> None:
    kind, n = bad.split(", ")
    line = f"static_assert(!is_same_v<T, {kind}> || N != {n});"
    calls = [
        CALL | {"template": [("T", dtype), ("N", n)]}
        for dtype in (mx.float32, mx.bfloat16)
        for n in (1, 2)
    ]

    with pytest.raises(CompileError, match="static assertion failed") as caught:
        check("some", ["x", "few"], ["out"], BODY.format(line), calls=calls)

    assert "at source line 4: static_assert" in str(caught.value)
    assert f"<{bad}>" in str(caught.value)


def test_calls_of_different_signatures_have_their_own_lines() -> None:
    # With x_ndim MLX writes a longer signature for an array than for a scalar.
    source = "uint i = thread_position_in_grid.x;\nout[i] = x_dim + undeclared;\n"
    calls = [
        CALL | {"inputs": [mx.zeros(shape), mx.zeros(4)]} for shape in ((64,), (8, 8))
    ]

    with pytest.raises(CompileError, match="at source line 2: out"):
        check("two", ["x", "few"], ["out"], source, calls=calls)


def test_a_multiplication_tells_its_operands() -> None:
    line = (
        "simdgroup_matrix<{}, 8, 8> a; simdgroup_matrix<half, 8, 8> b; "
        "simdgroup_float8x8 c; simdgroup_multiply_accumulate(c, a, b, c);"
    )

    assert checked(line.format("half")) == {("float", "half", "half", "float")}
    assert checked(line.format("bfloat")) == {("float", "bfloat", "half", "float")}
    assert checked("v = 1;") == frozenset()


TEXT = """#include <metal_stdlib>
using namespace metal;

template <typename T, int N>
[[kernel]] void fill(
    device T* out [[buffer(0)]],
    constant int& value [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  threadgroup T tile[N];
  tile[i % N] = T(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[0];
}
template [[host_name("fill_4")]] [[kernel]] void fill<half, 4>(
    device half*, constant int&, uint);
"""


def test_a_whole_text_is_checked_too() -> None:
    check_text(TEXT, instances=["fill<float, 8>", "fill<bfloat, 2>"])


def test_a_kernel_of_old_style_is_one_too() -> None:
    text = (
        "kernel void one(device float* out [[buffer(0)]]) {\n{} out[0] = tile[0]; }\n"
    )

    check_text(text.replace("{}", "threadgroup float tile[4];"))
    with pytest.raises(CompileError, match="at text line 2: threadgroup float"):
        check_text(text.replace("{}", "threadgroup float tile[1] = {1};"))


def test_a_buffer_without_a_space_is_refused() -> None:
    with pytest.raises(CompileError) as caught:
        check_text(TEXT.replace("device T* out", "T* out"), name="fill.metal")

    assert "fill.metal breaks Metal's rules:\n  pointer without" in str(caught.value)
    assert "at fill.metal line 6: T* out [[buffer(0)]]," in str(caught.value)


def test_only_the_instances_asked_for_are_filled_in() -> None:
    text = TEXT.replace("T(value)", "value < N ? 1.5f : float(value)")
    plain = text[: text.index("template [[host_name")]

    check_text(plain, instances=["fill<float, 8>"])
    with pytest.raises(CompileError, match="'float' to 'bfloat'"):
        check_text(plain, instances=["fill<float, 8>", "fill<bfloat, 8>"])


def test_a_compiler_that_cannot_check_accepts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(static_check, "_FLAGS", ("-no-such-flag",))

    with pytest.raises(metal_emulator.EmulatorError, match="cannot check Metal"):
        check_text(TEXT)
