"""Whole `.metal` texts: entries, constants, template arguments, calls."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import metal_emulator
from metal_emulator import CompileError, EmulatorError, library
from support.marks import needs_emulator

pytestmark = needs_emulator

TEXT = """
#include <metal_stdlib>
using namespace metal;

#define FIRST 600
constant short nsg [[function_constant(FIRST + 0)]];
constant bool negate [[function_constant(FIRST + 1)]];
constant float2 weights [[function_constant(2)]];
constant bool twice = is_function_constant_defined(negate) && negate;

struct Arguments { int n; float factor; };

kernel void scale(
    constant Arguments& args [[buffer(0)]],
    device const float* x [[buffer(1)]],
    device float* y [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  y[i] = x[i] * args.factor * nsg * (negate ? -1 : 1);
}

kernel void weighted(
    device const float* x,
    device float* y,
    uint i [[thread_position_in_grid]]) {
  y[i] = x[i] * weights.x + weights.y;
}

#define PAIR half, half4
template <typename T, typename T4, int N = 1>
kernel void vectors(
    device const T4* x,
    device T4* y,
    constant T& more,
    threadgroup T4* tile [[threadgroup(0)]],
    ushort3 at [[thread_position_in_threadgroup]],
    uint3 i [[thread_position_in_grid]]) {
  tile[at.x] = x[i.x];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i.x] = tile[at.x] * N + more;
}
typedef decltype(vectors<half, half4>) vectors_t;
template [[host_name("vectors_half")]] kernel vectors_t vectors<PAIR>;
#undef PAIR
template [[host_name("vectors")]] [[kernel]] void vectors<float, float4, 3>(
    device const float4*, device float4*, constant float&, threadgroup float4*,
    ushort3, uint3);
#if 0
template [[host_name("left_out")]]
kernel decltype(vectors<int, int4>) vectors<int, int4>;
#endif

[[host_name("counted")]] kernel void count(
    device atomic_uint& total [[buffer(0)]],
    device const float* bias [[buffer(1)]],
    device const float* x [[buffer(2)]]) {
  bool same = bias == x;
  atomic_fetch_add_explicit(&total, bias ? (same ? 100 : 10) : 1, memory_order_relaxed);
}

kernel void grow(device float* y, uint i [[thread_position_in_grid]]) { y[i] += 1; }
"""
ARGUMENTS = np.array([8], np.int32).tobytes() + np.array([0.5], np.float32).tobytes()
X = mx.arange(8).astype(mx.float32)
CALL: dict[str, Any] = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1)}
FLOATS: dict[str, Any] = {"output_shapes": [(8,)], "output_dtypes": [mx.float32]}
ONE: dict[str, Any] = {
    "output_shapes": [(1,)],
    "output_dtypes": [mx.float32],
    "grid": (1, 1, 1),
    "threadgroup": (1, 1, 1),
}


@pytest.fixture(scope="module")
def text() -> metal_emulator.Library:
    return library(TEXT, name="some.metal")


def test_entries_have_the_names_that_a_host_uses(text: metal_emulator.Library) -> None:
    assert [entry.name for entry in text.entries] == [
        *("scale", "weighted", "counted", "grow"),
        *("vectors_half", "vectors"),
    ]
    assert [str(constant) for constant in text.constants] == [
        "nsg (600): short",
        "negate (601): bool",
        "weights (2): float2",
    ]


@pytest.mark.parametrize("constants", [{"nsg": 4, "negate": True}, {600: 4, 601: 1}])
def test_constants_are_given_by_name_or_index(
    text: metal_emulator.Library, constants: dict[str | int, Any]
) -> None:
    (y,) = text.function("scale", constants)(inputs=[ARGUMENTS, X], **CALL, **FLOATS)

    assert y.tolist() == [-2 * i for i in range(8)]


@pytest.mark.parametrize("kind", ["half", "float", "bfloat"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e-3])
def test_a_constant_may_be_any_float(kind: str, value: float) -> None:
    head = f"constant {kind} c [[function_constant(0)]];\nconstant metal::{kind}2 d "
    text = (
        "[[function_constant(1)]];\nkernel void f(device float* y) { y[0] = c + d.y; }"
    )

    (y,) = library(head + text).function(constants={0: 0, "d": (0, value)})(
        inputs=[], **ONE
    )

    np.testing.assert_allclose(y.item(), value, rtol=2**-8)


def test_a_constant_may_be_a_vector(text: metal_emulator.Library) -> None:
    weighted = text.function("weighted", {"weights": (2, 0.5)})

    (y,) = weighted(inputs=[X], **CALL, **FLOATS)

    assert y.tolist() == [2 * i + 0.5 for i in range(8)]


def test_a_missing_constant_is_named(text: metal_emulator.Library) -> None:
    scale = text.function("scale", {"negate": False})

    with pytest.raises(CompileError) as caught:
        scale(inputs=[ARGUMENTS, X], **CALL, **FLOATS)

    assert str(caught.value) == (
        "kernel scale uses the function constant nsg (600): short, which has no value: "
        "expected constants={600: ...}, or --constant nsg=..."
    )


@pytest.mark.parametrize(
    ("constants", "words"),
    [
        ({"n": 4}, "constant 'n', expected one of the text: nsg (600): short, negate"),
        ({7: 4}, "constant 7, expected one of the text: nsg (600)"),
        ({"nsg": 4.5}, "constant nsg=4.5, expected a value of short"),
        ({"nsg": 2**15}, "constant nsg=32768, expected a value of short"),
        ({"weights": (10**400, 0)}, f"constant weights={10**20}"),
        ({"negate": 2}, "constant negate=2, expected a value of bool"),
        ({"weights": 1.0}, "constant weights=1.0, expected 2 numbers (float2)"),
        ({"nsg": 1, 600: 1}, "constant nsg is given by name and by index"),
    ],
)
def test_a_wrong_constant_is_refused(
    text: metal_emulator.Library, constants: dict[str | int, Any], words: str
) -> None:
    with pytest.raises(ValueError, match="constant") as caught:
        text.function("scale", constants)

    assert str(caught.value).startswith(words)


def vectors(function: metal_emulator.Function, dtype: mx.Dtype, **more: Any) -> Any:
    half = 0.5 if dtype == mx.float32 else mx.array(0.5, dtype)  # either is a T
    (y,) = function(
        inputs=[mx.arange(32).astype(dtype), half],
        output_shapes=[(32,)],
        output_dtypes=[dtype],
        threadgroup_memory={"tile": 8 * 4 * dtype.size},
        **CALL,
        **more,
    )
    return y.astype(mx.float32)


@pytest.mark.parametrize(
    ("name", "dtype", "factor"),
    [("vectors_half", mx.float16, 1), ("vectors", mx.float32, 3)],
)
def test_instances_run_by_their_host_names(
    text: metal_emulator.Library, name: str, dtype: mx.Dtype, factor: int
) -> None:
    function = text.function(name)

    function.check()
    with metal_emulator.emulated(trace=True):
        y = vectors(function, dtype)

    assert y.tolist() == [factor * i + 0.5 for i in range(32)]


TWICE = """
#define WIDE 0
#if WIDE
kernel void f(
    device const float* x, device float* y, constant int& n,
    uint i [[thread_position_in_grid]]) {
  y[i] = n * x[i];
}
constant int more [[function_constant(0)]];
constant int more = 9;
float first(device const float* p) { return p[1]; }
#elif defined(WIDE) && \\
    __METAL_VERSION__ >= 300 /* and
    two lines of a comment */
constant float more [[function_constant(0)]];
constant float more = 4.0f;
float first(device const float* p);
kernel void f(
    device float* y,
#ifdef ABSENT
    device float* z [[buffer(1)]],
#else
    device const float* x [[buffer(1)]],
#endif
    uint i [[thread_position_in_grid]]) {
  y[i] = 2 * x[i] + more + first(x)LATER;
}
#endif
#ifndef WIDE
kernel void g(device float* y) {}
float first(const device float* p) { return p[2]; }
#else
float first(const device float* p) { return p[3]; }
#endif
"""


def test_what_is_written_twice_is_what_the_preprocessor_leaves() -> None:
    twice = library(TWICE.replace("LATER", ""))
    y = [
        twice.function("f", constants)(inputs=[X], **CALL, **FLOATS)[0].tolist()
        for constants in ({}, {"more": 0.5}, {0: 0.25})
    ]

    assert [str(entry) for entry in twice.entries] == [
        "f\n    device float* y, device const float* x"
    ]
    assert [str(constant) for constant in twice.constants] == ["more (0): float"]
    assert y == [[2 * i + more + 3 for i in range(8)] for more in (4, 0.5, 0.25)]
    twice.function("f").check()
    with pytest.raises(EmulatorError, match=r"text line 26: y\[i\] = 2 \* x\[i\]"):
        library(TWICE.replace("LATER", " + x[99]")).function("f")(
            inputs=[X], **CALL, **FLOATS
        )


def test_the_check_is_of_one_instance_and_of_any_branch() -> None:
    text = """
    template <typename T> kernel void f(device T* y) { y[0] = T(1).x; }
    #if __METAL_VERSION__ < 320
    template [[host_name("g")]] kernel decltype(f<int4>) f<int4>;
    #endif
    template [[host_name("good")]] kernel decltype(f<int2>) f<int2>;
    template [[host_name("bad")]] kernel decltype(f<int>) f<int>;
    """
    function = library(text).function

    function("good").check()
    with pytest.raises(CompileError, match="member reference base type 'int'"):
        function("bad").check()


def test_a_text_that_the_preprocessor_refuses_says_why() -> None:
    wrong = "#if 1 +\n#endif\nkernel void f(device float* y) { y[0] = 1; }"

    with pytest.raises(CompileError, match=r"error: expected value in expression\n.*1"):
        library(wrong).function()(inputs=[], **ONE)


def test_vector_types_are_template_arguments() -> None:
    alone = TEXT[: TEXT.index("typedef decltype")]
    function = library(alone).function("vectors")
    template = [("T", mx.bfloat16), ("T4", "bfloat4"), ("N", 2)]

    function.check(template)
    y = vectors(function, mx.bfloat16, template=template)

    assert y.tolist() == [2 * i + 0.5 for i in range(32)]
    with pytest.raises(ValueError, match="template parameter 'T' has no value"):
        vectors(function, mx.bfloat16, template=[("T4", "half4")])
    with pytest.raises(ValueError, match="template argument 'K', expected a parameter"):
        vectors(function, mx.bfloat16, template=[("K", 1)])
    with pytest.raises(ValueError, match=r"template argument '\{\}', expected a dtype"):
        vectors(function, mx.bfloat16, template=[("T", "{}")])


@pytest.mark.parametrize(
    ("inputs", "total"),
    [
        ({"bias": None, "x": X}, 8),
        ({"bias": mx.zeros(8), "x": X}, 80),
        ({"bias": X, "x": X}, 800),
        ({"bias": None, "x": X, "total": mx.array([1000], mx.uint32)}, 1008),
    ],
    ids=["not set", "two buffers", "one buffer", "with a start"],
)
def test_buffers_are_unset_shared_or_begun(
    text: metal_emulator.Library, inputs: dict[str, Any], total: int
) -> None:
    count = {"output_shapes": [(1,)], "output_dtypes": [mx.uint32], "init_value": 0}

    (found,) = text.function("counted")(inputs=inputs, **CALL, **count)

    assert found.item() == total


def test_an_output_begins_with_an_input_of_its_name(
    text: metal_emulator.Library,
) -> None:
    grow = text.function("grow")
    with metal_emulator.emulated(trace=True):
        (y,) = grow(inputs={"y": X}, **CALL, **FLOATS)
        with pytest.raises(EmulatorError, match="never written"):
            grow(inputs=[], **CALL, **FLOATS)

    assert y.tolist() == [i + 1 for i in range(8)]
    with pytest.raises(ValueError, match="'y' is an output too, expected an array of"):
        grow(inputs={"y": X[:4]}, **CALL, **FLOATS)


SCALE = {"nsg": 1, "negate": False}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"inputs": [X]}, "kernel scale: 1 inputs, expected 2 (args, x)"),
        ({"inputs": {"x": X}}, "parameter 'args' needs an input or output of its name"),
        (
            {"inputs": {"x": X, "args": ARGUMENTS, "z": 1}},
            "an input or output 'z', expected a parameter (args, x, y)",
        ),
        (
            {"inputs": [3, X]},
            "parameter 'args' is constant Arguments&, expected an array or bytes, not",
        ),
        (
            {"inputs": [ARGUMENTS, X.astype(mx.float16)]},
            "parameter 'x' is device const float*, expected an array of that type or",
        ),
        ({"output_dtypes": [mx.int32]}, "parameter 'y' is device float*, expected an"),
        ({"output_shapes": []}, "output_shapes has 0 items, expected 1 (y)"),
        ({"threadgroup_memory": {"t": 16}}, "threadgroup memory 't', expected a param"),
        ({"threadgroup": (2048, 1, 1)}, "Thread group size (2048) is greater than"),
    ],
)
def test_a_wrong_call_is_refused(
    text: metal_emulator.Library, call: dict[str, Any], words: str
) -> None:
    right = {"inputs": [ARGUMENTS, X], **CALL, **FLOATS}

    with pytest.raises(ValueError, match=r"kernel|Thread") as caught:
        text.function("scale", SCALE)(**{**right, **call})

    assert words in str(caught.value)


def test_parameters_of_two_function_constants_may_have_one_index() -> None:
    head = "constant bool a [[function_constant(0)]];\nkernel void f(device float* y "
    x = "[[function_constant(a), buffer(0)]], device int* z [[buffer(0), "

    function = library(f"{head}{x}function_constant(b)]]) {{ }}").function()

    assert function.outputs == ("y", "z")


def test_types_have_their_other_names_too() -> None:
    text = """
    #include <simd/simd.h>
    constant unsigned short offset [[function_constant(0)]];
    constant metal::uint2 pair [[function_constant(1)]];
    kernel void f(
        device const unsigned int* x, constant signed char& s,
        device unsigned long int* y, const metal::uint3 at [[thread_position_in_grid]],
        unsigned short lane [[thread_index_in_simdgroup]],
        unsigned n [[threads_per_grid]]) {
      y[at.x] = x[lane] + s + offset + pair.y + n;
    }
    """
    function = library(text).function(constants={0: 65535, "pair": (0, 2**32 - 1)})

    function.check()
    (y,) = function(
        inputs=[mx.arange(8).astype(mx.uint32), -1],
        output_shapes=[(8,)],
        output_dtypes=[mx.uint64],
        **CALL,
    )

    assert y.tolist() == [(i - 1 + 65535 + 2**32 - 1 + 8) % 2**32 for i in range(8)]
    with pytest.raises(
        ValueError, match="'x' is device const uint\\*, expected an arr"
    ):
        function(inputs=[X, 1], output_shapes=[(8,)], output_dtypes=[mx.uint64], **CALL)


def test_numbers_have_the_type_of_their_parameter() -> None:
    body = "{ y[0] = n + small; }"
    head = "kernel void f(device float* y, constant ulong& n, constant uchar* s)"
    function = library(f"{head} {body.replace('small', 's[0]')}").function()

    (y,) = function(inputs=[2**40, 255], **ONE)

    assert y.item() == 2**40
    with pytest.raises(ValueError, match="expected a number of that type, not 256"):
        function(inputs=[1, 256], **ONE)


@pytest.mark.parametrize(
    ("source", "entry", "outputs", "words"),
    [
        (TEXT, None, None, "no entry is named, expected a kernel of some."),
        (TEXT, "f", None, "entry f, expected a kernel of some.metal"),
        (
            TEXT,
            "scale",
            ["x"],
            "output 'x', expected a parameter in device memory, not const (y)",
        ),
        ("uint kernel = 1; y[0] = kernel;", None, None, "(none: it is a body)"),
        (
            "kernel void f(device int* x [[buffer(1)]], device int* y [[ buffer(1) ]])"
            " {}",
            *(None, None),
            "parameters 'x' and 'y' are both [[buffer(1)]], expected another index",
        ),
        (
            "kernel void f(threadgroup int* x [[threadgroup(0)]], device int* y "
            "[[buffer(0)]], threadgroup float* z [[threadgroup(0)]]) {}",
            *(None, None),
            "parameters 'x' and 'z' are both [[threadgroup(0)]], expected another",
        ),
        (
            "kernel void f(texture2d<float> t [[texture(0)]]) {}",
            *(None, None),
            "parameter 'texture2d<float> t [[texture]]', expected a buffer",
        ),
    ],
)
def test_what_cannot_be_chosen_is_told(
    source: str, entry: str | None, outputs: list[str] | None, words: str
) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        library(source, name="some.metal").function(entry, outputs=outputs)

    assert words in str(caught.value)


def test_files_in_quotes_are_included_and_named(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "one.h").write_text(
        '#pragma once\n#include "two.h"\nconstant int one = 1;\n'
    )
    (tmp_path / "inner" / "two.h").write_text(
        "#ifndef TWO\n#define TWO 2\n#endif\ninline float wrong(device float* y) {\n"
        "  return y[100];\n}\n"
    )
    function = library(
        '#include "one.h"\n#include "one.h"\n#if 0\n#include "absent.h"\n#endif\n'
        "kernel void f(device float* y) { y[0] = one + TWO; }\n"
        "kernel void g(device float* y) {\n  y[0] = wrong(y);\n}\n",
        name="top.metal",
        include=[tmp_path / "inner"],
    ).function

    assert function("f")(inputs=[], **ONE)[0].item() == 3
    with pytest.raises(EmulatorError) as caught:
        function("g")(inputs=[], **ONE)
    assert "at two.h line 5: return y[100];" in str(caught.value)
    assert "at top.metal line 8: y[0] = wrong(y);" in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.h").write_bytes(b"\xff")

    with pytest.raises(ValueError, match=r"odd.h: byte 0 is not UTF-8, expected a tex"):
        library('#include "odd.h"', include=[tmp_path])
