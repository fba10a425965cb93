"""Every detector of the emulator fires on a planted bug, and names the place."""

import platform
import re
import signal
import sys
from dataclasses import replace
from fnmatch import fnmatch

import mlx.core as mx
import pytest
from hypothesis import strategies as st

from metal_emulator import CompileError, EmulatorError, emulated
from metal_emulator.compiling import compiler
from support.marks import needs_emulator
from support.metal_sources import FLOATS, HALVES, each_thread, run
from support.profiles import drawn, sampled

pytestmark = [
    needs_emulator,
    pytest.mark.skipif(
        sys.platform == "darwin",
        reason="lines come from DWARF in ELF files: on macOS reports have none",
    ),
]


def report(source: str, *inputs: object, **options: object) -> str:
    """What the emulator says about a kernel named "bug"."""
    with pytest.raises(EmulatorError) as caught:
        run(source, *inputs, name="bug", **options)
    return str(caught.value)


def test_a_read_behind_a_buffer_is_reported() -> None:
    source = """
    uint i = thread_position_in_grid.x;
    out[i] = a[i + 60];
    """

    assert report(source, FLOATS) == (
        "kernel bug: read outside buffer 'a' (256 bytes), at byte 256\n"
        "  in threadgroup (0, 0, 0), thread (4, 0, 0), simdgroup 0 lane 4\n"
        "  at source line 3: out[i] = a[i + 60];"
    )


def test_a_write_behind_a_buffer_is_reported() -> None:
    source = "uint3 p = thread_position_in_grid;\nout[p.y * 8 + p.x] = 0;"

    message = report(source, shape=(4, 8), grid=(8, 5, 1), threadgroup=(8, 1, 1))

    assert "write outside buffer 'out' (128 bytes), at byte 128" in message
    assert "in threadgroup (0, 4, 0), thread (0, 0, 0)" in message
    assert "at source line 2: out[p.y * 8 + p.x] = 0;" in message


@pytest.mark.parametrize("index", [-5000, 5000, 100_000_000, -400_000_000])
def test_far_accesses_are_reported(index: int) -> None:
    message = report("out[0] = a[b];", FLOATS, index)

    assert f"read outside buffer 'a' (256 bytes), at byte {4 * index}" in message


@drawn(30, size=st.integers(8, 5000), offset=st.integers(0, 9))
def test_the_first_byte_behind_16_is_guarded(size: int, offset: int) -> None:
    a = mx.arange(size + offset).astype(mx.uint8)[offset:]
    mx.eval(a)
    source = "out[0] = a[b];"

    run(source, a, size - 1, grid=1)
    last = (size + offset + 15) // 16 * 16 - offset
    message = report(source, a, last, grid=1)

    assert f"read outside buffer 'a' ({size} bytes), at byte {last}" in message


def test_a_read_of_the_slack_behind_a_buffer_is_nan() -> None:
    a = mx.arange(9).astype(mx.float32)

    out = each_thread("a[9]", a)

    assert (out != out).all()


@pytest.mark.parametrize(("index", "where"), [(-1, "before"), (9, "behind")])
def test_a_write_close_to_an_output_is_reported(index: int, where: str) -> None:
    message = report("out[a] = 1;", index, shape=(9,))

    assert message == (
        f"kernel bug: write outside buffer 'out' (36 bytes), close {where} it"
    )


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a", "byte 8 of input buffer 'a' (256"),
        ("a_shape", "byte 8 of input buffer 'a_shape' (12"),
    ],
)
def test_a_write_to_an_input_or_its_shape_is_reported(name: str, what: str) -> None:
    array = FLOATS.reshape(4, 4, 4)

    message = report(f"((device int*){name})[2] = 1;", array)

    assert f"write to {what} bytes)" in message
    assert "at source line 1" in message


HELPER = "float get(const device float* p, int i) {\n  return p[i];\n}\n"


@pytest.mark.parametrize(
    ("header", "line"),
    [
        (HELPER, "header line 2"),
        (f"__attribute__((noinline)) {HELPER}", "header line 2"),
        (f'#line 10 "lib/get.metal"\n{HELPER}', "lib/get.metal line 11"),
    ],
    ids=["inlined", "not inlined", "directive"],
)
def test_lines_of_helpers_and_of_their_callers_are_named(
    header: str, line: str
) -> None:
    directive = '#line 1 "top.metal"' if "#" in header else ""

    message = report(f"{directive}\nout[0] = 1 + get(a, 64);", FLOATS, header=header)

    assert f"at {line}: return p[i];" in message
    caller = "top.metal line 1" if directive else "source line 2"
    assert f"at {caller}: out[0] = 1 + get(a, 64);" in message


TILE = """
threadgroup float tile[30];
threadgroup float* flat = tile;
uint i = thread_index_in_threadgroup;
flat[int(i) + b] = a[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
out[i] = flat[i];
"""


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (2, r"write outside threadgroup variable 'tile' \(120 bytes\), at byte 128\n"),
        (-2000, r"write outside threadgroup variable 'tile' .*, at byte -8000\n"),
        (0, r"write outside threadgroup variable 'tile', close to it\n"),
        (-1, r"write outside threadgroup variable 'tile', close to it\n"),
    ],
)
def test_accesses_outside_threadgroup_memory_are_reported(
    offset: int, message: str
) -> None:
    found = report(TILE, FLOATS, offset)

    assert re.search(message, found)
    if "close" not in message:
        assert "at source line 5: flat[int(i)" in found


def test_threadgroup_memory_starts_as_nan_in_every_threadgroup() -> None:
    source = """
    threadgroup float hand[32];
    uint i = thread_index_in_threadgroup;
    out[thread_position_in_grid.x] = hand[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    hand[i] = 1;
    """

    with emulated(workers=1):
        out = run(source, grid=128, shape=(128,))

    assert (out != out).all()


LARGE = """
threadgroup float x[8000];
threadgroup half y[SIZE];
x[0] = y[0];
out[0] = 1;
"""


def test_32_kib_of_threadgroup_memory_is_the_limit() -> None:
    assert run(LARGE.replace("SIZE", "384"))[0] == 1

    message = report(LARGE.replace("SIZE", "385"))

    assert "32770 bytes of threadgroup memory with variable 'y'" in message
    assert "at source line 3: threadgroup half y[385];" in message


MEETINGS = {
    "missing lanes": (
        "uint lane = thread_index_in_simdgroup;\n"
        "if (lane < 31) { out[lane] = simd_sum(1.0f); }",
        96,
        "simd_sum with missing lanes in simdgroup 0: lanes 7fffffff in simd_sum at "
        "source line 2, 1 of 32 have returned",
    ),
    "lanes that returned before": (
        "if (thread_index_in_simdgroup < 4) { return; }\n"
        "out[0] = simd_shuffle_xor(1.0f, 1);",
        32,
        "simd_shuffle_xor with missing lanes in simdgroup 0: 4 of 32 have returned, "
        "lanes fffffff0 in simd_shuffle_xor",
    ),
    "different operations": (
        "if (thread_index_in_simdgroup < 16) { out[0] = simd_max(1.0f); }\n"
        "else { out[0] = simd_shuffle_xor(1.0f, 1); }",
        32,
        "lanes of simdgroup 0 in different operations: lanes 0000ffff in simd_max at "
        "source line 1, lanes * in simd_shuffle_xor at source line 2",
    ),
    "a simdgroup that skips a barrier": (
        "if (simdgroup_index_in_threadgroup == 2) { return; }\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        128,
        "barrier not reached by all threads: 96 wait at source line 2, "
        "32 have returned",
    ),
    "different barriers": (
        "if (thread_index_in_simdgroup < 8) {\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup); } else {\n"
        "threadgroup_barrier(mem_flags::mem_device); }",
        32,
        "lanes 000000ff in threadgroup_barrier at source line 2, lanes * in "
        "threadgroup_barrier at source line 3",
    ),
    "an operation against a barrier": (
        "if (thread_index_in_simdgroup < 8) { out[0] = simd_sum(1.0f); }\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        64,
        "simd_sum with missing lanes in simdgroup 0: lanes 000000ff in simd_sum at "
        "source line 1, lanes ffffff00 in threadgroup_barrier at source line 2",
    ),
}
"""Kernels, their threads, and what is said of where those do not meet, * for any."""


@pytest.mark.parametrize(
    ("source", "threads", "words"), MEETINGS.values(), ids=MEETINGS
)
def test_threads_that_do_not_meet_are_reported(
    source: str, threads: int, words: str
) -> None:
    message = report(source, grid=threads, threadgroup=threads)

    assert fnmatch(message, f"*{words}*")


CALLS = (
    "v = simd_sum(v)",
    "v = simd_shuffle_xor(v, 1)",
    "v = quad_sum(v)",
    "v = simd_any(v > 3)",
    "simdgroup_barrier(mem_flags::mem_threadgroup)",
    "threadgroup_barrier(mem_flags::mem_none)",
    "simdgroup_load(m, a)",
    "simdgroup_store(m, out)",
    "simdgroup_multiply_accumulate(m, m, m, m)",
)


@pytest.mark.parametrize("call", CALLS)
def test_equal_operations_in_two_branches_are_reported(call: str) -> None:
    branches = [
        f"if (b == {j}) {{\nif (lane < 16) {{ {each}; }}\nelse {{ {each}; }}\n}}"
        for j, each in enumerate(CALLS)
    ]
    lines = (
        "uint lane = thread_index_in_simdgroup;",
        "float v = a[lane];",
        "simdgroup_float8x8 m(1.0f);",
        *branches,
        "out[lane] = v + m.thread_elements()[0];",
    )
    chosen = CALLS.index(call)

    message = report("\n".join(lines), FLOATS, chosen, shape=(64,))

    name = call.removeprefix("v = ").split("(")[0]
    assert f"lanes 0000ffff in {name} at source line {4 * chosen + 5}" in message
    assert f"in {name} at source line {4 * chosen + 6}" in message


@pytest.mark.parametrize("call", ["sums(v)", "simd_sum(v)", "kept<__COUNTER__>(v)"])
def test_one_line_with_two_operations_has_two_places(call: str) -> None:
    header = "inline float sums(float v) { return simd_sum(v); }\n"
    header += "template <int n> __attribute__((noinline)) float kept(float v) "
    header += "{ return simd_sum(v + n); }\n"
    source = "float v = a[0]; bool b = thread_index_in_simdgroup < 8;\n"
    source += f"if (b) {{ v = {call}; }} else {{ v = {call}; }} out[0] = v;"

    assert "lanes of simdgroup 0 in different operations: lanes 000000ff in" in (
        report(source, FLOATS, header=header)
    )


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        "threadgroup_barrier(mem_flags::mem_threadgroup)",
        "simdgroup_barrier(mem_flags::mem_threadgroup)",
        "simdgroup_multiply_accumulate(m, m, m, m)",
    ],
)
def test_one_operation_that_the_compiler_copied_is_one(call: str, trace: bool) -> None:
    """In the loop, which clang unrolls, each lane goes through one of two copies."""
    source = f"""
    uint i = thread_index_in_threadgroup;
    threadgroup float tile[64];
    float v = a[i];
    simdgroup_float8x8 m(1.0f);
    out[i] += 1;
    for (int k = 0; k < 4; ++k) {{
      if (i < 16) {{ tile[i] = a[i + k]; }}
      {call};
      if (i < 16) {{ v += tile[i]; }}
    }}
    out[i] += v + 0 * m.thread_elements()[0];
    """
    call = {"grid": 64, "threadgroup": 64, "shape": (64,), "init_value": 2}

    with emulated(trace=trace):
        out = run(source, FLOATS, **call)

    assert out.tolist() == [3 + (5 * i + 6 if i < 16 else i) for i in range(64)]


OF_MATRICES = (
    "simdgroup_multiply(m, m, m);",
    "simdgroup_load(m, a);",
    "simdgroup_store(m, out);",
)


@pytest.mark.parametrize("operation", OF_MATRICES)
def test_matrices_need_whole_simdgroups(operation: str) -> None:
    lines = [f"if (b == {j}) {each}" for j, each in enumerate(OF_MATRICES)]
    source = "\n".join(["simdgroup_float8x8 m(1.0f);", *lines])
    chosen = OF_MATRICES.index(operation)

    message = report(source, FLOATS, chosen, grid=40, threadgroup=40, shape=(64,))

    name = operation.split("(")[0]
    assert f"{name} in an incomplete simdgroup (threadgroup of 40 threads)" in message
    assert f"at source line {2 + chosen}: {lines[chosen]}" in message


def test_a_stack_overflow_is_reported() -> None:
    header = """
    __attribute__((noinline)) float deep(int n) {
      volatile float local[64];
      local[n % 64] = n;
      return n == 0 ? 0 : deep(n - 1) + local[n % 32];
    }
    """

    message = report("out[0] = deep(100000);", header=header)

    assert "stack overflow" in message
    assert "at header line" in message


UNDEFINED = {
    "((const device float4*)(a + 1))[i]": "misaligned access",
    "float4(*(const device half4*)(b + i))": "misaligned access",
    "float4(100 / int(a[i]))": "integer division by zero",
    "float4(1 << int(a[i + 32]))": "shift by the width of the type or more",
}


@pytest.mark.parametrize(("expression", "what"), UNDEFINED.items())
def test_undefined_operations_are_reported(expression: str, what: str) -> None:
    lines = [f"if (c == {j}) v = {each};" for j, each in enumerate(UNDEFINED)]
    source = "\n".join(
        [
            "uint i = thread_position_in_grid.x; float4 v = 0;",
            *lines,
            "float table[4] = {1, 2, 3, float(i)};",
            "out[i] = v.x + v.y + v.z + v.w + table[i % 4];",
        ]
    )
    chosen = [*UNDEFINED].index(expression)
    found = compiler.find()
    assert found is not None

    message = report(source, FLOATS, HALVES, chosen)

    said = what if found.traps_name_checks else "misaligned access, integer division by"
    assert f"kernel bug: {said}" in message
    assert f"at source line {2 + chosen}: {lines[chosen]}" in message


INTEGERS = {"char": mx.int8, "short": mx.int16, "int": mx.int32, "long": mx.int64}
DIVIDED = [
    f"{kind}{size}* {operator}"
    for operator in "/%"
    for kind, size in [("int", ""), ("long", ""), *((each, 4) for each in INTEGERS)]
]


@sampled(8)
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="arm64 divides without a fault",
)
@pytest.mark.parametrize("by", [-1, 0])
@pytest.mark.parametrize("division", DIVIDED)
def test_a_division_that_overflows_is_not_one_by_zero(division: str, by: int) -> None:
    lines = []
    for j, each in enumerate(DIVIDED):
        pointer, operator = each.split()
        x, y = (f"*(const device {pointer}){name}" for name in "ab")
        lines.append(f"if (c == {j}) out[0] = all(({x} {operator} {y}) == 0);")
    dtype = INTEGERS[division.split("*")[0].rstrip("4")]
    least = -(2 ** (8 * dtype.size - 1))
    a, b = (mx.array([value] * 32, dtype) for value in (least if by else 5, by))

    message = report(
        "\n".join(lines), a.view(mx.uint8), b.view(mx.uint8), DIVIDED.index(division)
    )

    overflows, zero = "overflows: the least value by -1", "division by zero"
    assert (overflows in message, zero in message) == (by == -1, by == 0)


def test_traps_without_the_name_of_a_check_tell_all_that_it_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clang 19 counts its traps, and a count may be the number of another check."""
    found = compiler.find()
    assert found is not None
    counting = replace(found, traps_name_checks=False)
    monkeypatch.setattr(compiler, "find", lambda: counting)

    message = report("out[0] = 100 / int(a[0]);", FLOATS)

    assert "misaligned access, integer division by zero, or shift by" in message


def test_the_process_survives_and_the_next_launch_is_right() -> None:
    for _ in range(20):
        report("out[0] = a[64 + thread_index_in_simdgroup];", FLOATS, grid=4096)

        assert each_thread("a[i] + 1", FLOATS)[31] == 32


def test_a_fault_in_any_worker_is_reported() -> None:
    source = """
    uint group = threadgroup_position_in_grid.x;
    for (int j = 0; j < 2000; ++j) { simdgroup_barrier(mem_flags::mem_threadgroup); }
    out[group == 77 ? 1000 : 0] = 1;
    """

    with emulated(workers=4):
        message = report(source, grid=32 * 100)

    assert "in threadgroup (77, 0, 0)" in message


def test_signal_handlers_are_given_back() -> None:
    caught = []
    before = signal.signal(signal.SIGFPE, lambda *_: caught.append(True))

    each_thread("1.0f")
    signal.raise_signal(signal.SIGFPE)

    signal.signal(signal.SIGFPE, before)
    assert caught


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "uint i = 0;\nout[i] = missing;",
            "error: use of undeclared identifier 'missing'\n"
            "    at source line 2: out[i] = missing;",
        ),
        ("float4 v = float4(1, 2, 3);", "wrong number of elements for this vector"),
        ("double x = 1; out[0] = x;", "metal_has_no_double"),
        ("out[0] = helper(1);", "at header line 2: return absent;"),
        ("constant float& x = a[0]; x = 1;", "error: cannot assign to variable 'x'"),
    ],
)
def test_what_does_not_compile_is_named_by_its_line(source: str, message: str) -> None:
    header = "template <typename T> float helper(T x) {\n  return absent;\n}\n"
    header = header if "helper" in source else ""

    with pytest.raises(CompileError, match="kernel bug does not compile") as caught:
        run(source, FLOATS, name="bug", header=header)

    assert message in str(caught.value)


def test_a_function_without_a_body_does_not_compile() -> None:
    with pytest.raises(CompileError, match=r"does not link: .*absent"):
        each_thread("absent(1.0f)", header="float absent(float x);\n")
