"""The command takes files that define kernels whole."""

import json
from pathlib import Path

import numpy as np
import pytest

from metal_emulator.command_line.main import main
from support.marks import needs_emulator

pytestmark = needs_emulator

WHOLE = """// Copyright © 2026
#include <metal_stdlib>
using namespace metal;

struct Arguments { uint n; float factor; };

kernel void scale(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    constant Arguments& arguments [[buffer(2)]],
    threadgroup half* hold [[threadgroup(0)]],
    uint i [[thread_position_in_grid]],
    ushort2 inside [[thread_position_in_threadgroup]]) {
  hold[inside.x] = half(x[i]);
  if (i < arguments.n) y[i] = arguments.factor * hold[inside.x];
}

template <typename T, int N = 2>
[[kernel, max_total_threads_per_threadgroup(64)]] void shift(
    device T* values [[buffer(0)]],
    device atomic_uint* count [[buffer(1)]],
    constant int& by,
    uint3 i [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  values[i.x] = T(i.x + by * N);
  if (lane == 0) atomic_fetch_add_explicit(count, 1, memory_order_relaxed);
}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "whole.metal"
    path.write_text(WHOLE, encoding="utf-8")
    return path


@pytest.fixture
def scale(file: Path, tmp_path: Path) -> list[str]:
    """The command that scales 32 numbers by 3."""
    arguments = np.array([32], np.uint32).tobytes() + np.array([3], "f4").tobytes()
    np.save(tmp_path / "arguments.npy", np.frombuffer(arguments, np.uint8))
    return [
        *(str(file), "--entry", "scale", "--grid", "32"),
        *("--input", "x=32:float32:arange", "--output", "y=32:float32"),
        *("--input", f"arguments={tmp_path / 'arguments.npy'}"),
        *("--threadgroup-memory", "hold=64"),
    ]


def test_a_whole_kernel_is_checked_and_run(
    scale: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status = main([*scale, "--check"])

    assert capsys.readouterr().out == (
        "y: float32 32, min 0, max 93, mean 46.5, 0 NaN or infinite\n"
    )
    assert status == 0


def test_its_faults_are_told_with_the_lines_of_the_file(
    scale: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status = main([*scale[:-1], "hold=48", "--trace"])

    assert status == 1
    said = capsys.readouterr().out
    assert "kernel scale: write outside threadgroup variable 'hold'" in said
    assert "at whole.metal line 14: hold[inside.x] = half(x[i]);" in said


def test_a_template_with_atomic_and_filled_outputs(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(file), "--entry", "shift", "--grid", "64", "--check"]
    outputs = ["--output", "values=64:uint32", "--output", "count=1:uint32"]
    template = ["--template", "T=uint32", "--template", "N=5", "--input", "by=2"]
    options = ["--atomic-outputs", "--init-value", "7"]

    status = main([*command, *outputs, *template, *options])

    assert status == 0
    said = capsys.readouterr().out
    assert "values: uint32 64, min 10, max 73" in said
    assert "count: uint32 1, min 9, max 9" in said


def test_elements_that_nobody_writes_are_told(
    scale: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [word.replace("y=32:", "y=40:") for word in scale]

    assert main([*command, "--trace"]) == 0

    said = capsys.readouterr().err
    assert "8 of 40 elements of output 'y' were never written, the first is" in said


def test_messages_name_lines_of_the_file_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pasted.metal"
    path.write_text(
        "#define MAKE(kind) kind##9 pasted;\nMAKE(float)\ny[0] = 1;", encoding="utf-8"
    )
    command = [str(path), "--grid", "1", "--output", "y=1:float32"]

    assert main(command) == 1
    plain = capsys.readouterr().out
    assert main([*command, "--check"]) == 1
    checked = capsys.readouterr().out

    assert "unknown type name 'float9'" in plain
    assert "unknown type name 'float9'" in checked
    assert "scratch space" not in plain + checked
    assert "at source line 2: MAKE(float)" in plain


CONSTANTS = """
constant int nsg [[function_constant(600)]];
constant float2 pair [[function_constant(1)]];
template <typename T>
kernel void fill(
    device T* y, device const T* x, uint i [[thread_position_in_grid]]) {
  y[i] = x ? x[i] : T(nsg * pair.x + pair.y);
}
template [[host_name("fill_half4")]] kernel decltype(fill<half4>) fill<half4>;
kernel void none() {}
"""


@pytest.fixture
def constants(tmp_path: Path) -> str:
    path = tmp_path / "constants.metal"
    path.write_text(CONSTANTS, encoding="utf-8")
    return str(path)


def test_entries_are_listed_if_none_is_named(
    constants: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([constants]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "fill <T>",
        "    device T* y, device const T* x",
        "none",
        "    ",
        "fill_half4 = fill<half4>",
        "    device T* y, device const T* x",
        "function constants: nsg (600): int, pair (1): float2",
    ]
    assert main([constants, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed["entries"]] == [
        *("fill", "none", "fill_half4")
    ]
    assert listed["constants"][0] == {"name": "nsg", "index": 600, "type": "int"}


FILL = ["--grid", "4", "--input", "x=none"]
VALUES = ["--constant", "nsg=4", "--constant", "1=2.5,-1"]


@pytest.mark.parametrize(
    "options",
    [
        ["--entry", "fill_half4", "--output", "y=16:float16"],
        ["--kernel", "fill", "--template", "T=half4", "--output", "y=16:float16"],
    ],
)
def test_constants_instances_and_vector_types_are_given(
    constants: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([constants, *options, *FILL, *VALUES, "--check", "--trace"]) == 0
    assert "y: float16 16, min 9, max 9, mean 9" in capsys.readouterr().out


def test_one_buffer_for_two_parameters_and_files_in_quotes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "same.h").write_text("#define SAME(a, b) (a == b)\n")
    file = tmp_path / "same.metal"
    file.write_text(
        '#include "same.h"\nkernel void f(device const float* a, device const float* b,'
        " device int* y) { y[0] = SAME(a, b); }\n"
    )
    command = [str(file), "--grid", "1", "--output", "y=1:int32"]
    command += ["--include", str(tmp_path / "other"), "--input", "a=2:float32"]

    for other, result in (("a", 1), ("2:float32", 0)):
        assert main([*command, "--input", f"b={other}"]) == 0
        assert f"y: int32 1, min {result}, max {result}" in capsys.readouterr().out


FILLED = "--entry fill --grid 4 --input x=none --output y=16:float16"
BODY = "y[0] = 1;"
ONE = "--grid 1 --output y=1:int32"


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (CONSTANTS, "--entry none", "--grid is missing, expected the threads of the"),
        (CONSTANTS, f"{FILLED} --constant nsg", "'nsg', expected NAME=VALUE or INDEX="),
        (CONSTANTS, f"{FILLED} --constant nsg=x", "expected true, false or numbers"),
        (CONSTANTS, f"{FILLED} --constant a=1 --constant a=2", "a is given twice, exp"),
        (CONSTANTS, f"{FILLED} --template T={{", "argument '{', expected a dtype, a n"),
        (
            CONSTANTS,
            f"{FILLED} --threadgroup-memory h=x",
            "'x', expected a number of",
        ),
        (BODY, f"{ONE} --entry f", "--entry f, expected a kernel with a signature"),
        (BODY, f"{ONE} --constant a=1", "--constant ['a=1'], expected a kernel with a"),
        (BODY, f"{ONE} --input x=none", "--input x=none, expected a value"),
        (BODY, f"{ONE} --template T=half4", "'T=half4', expected an integer, true"),
        (BODY, f"{ONE} --output x=4x8", "'4x8', expected an array such as 8x512:float"),
        (BODY, f"{ONE} --output x", "--output 'x', expected NAME=VALUE"),
        (BODY, f"{ONE} --input x=half", "'half' is neither"),
        (BODY, f"{ONE} --threadgroup a", "--threadgroup 'a', expected one to three"),
    ],
)
def test_wrong_options_are_told_in_a_line(
    tmp_path: Path,
    text: str,
    options: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "kernels.metal"
    file.write_text(text, encoding="utf-8")

    assert main([str(file), *options.split()]) == 2

    said = capsys.readouterr().err
    assert said.startswith("python -m metal_emulator: error: ")
    assert words in said
    assert said.count("\n") == 1
