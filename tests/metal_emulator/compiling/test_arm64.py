"""The run time and kernels on arm64: compiled for two systems, run where QEMU is."""

import functools
import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal_emulator.compiling import build
from metal_emulator.compiling import flags as compiler_flags
from metal_emulator.dispatch import record
from metal_emulator.language.frontend import translate
from metal_emulator.reports.context import Fault

ZIG = importlib.util.find_spec("ziglang")
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
PROGRAM = Path(__file__).with_name("arm64_program.cpp")
INCLUDE = ("-I", str(build.INCLUDE), "-I", str(build.INCLUDE / "metal"))
RUNTIME = [str(path) for path in sorted((build.HERE / "runtime").glob("*.cpp"))]
TARGET = "aarch64-linux-musl"

pytestmark = pytest.mark.skipif(
    ZIG is None, reason="the wheel `ziglang` compiles for other machines"
)
runs = pytest.mark.skipif(QEMU is None, reason="no qemu-aarch64 runs arm64 programs")

KERNEL = """
#include "kernel.h"
void bug(const half* x, float* y, simdgroup_matrix<half, 8, 8> a) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[0] = simd_sum(float(x[0]));
  simdgroup_multiply(a, a, a);
}
"""


def zig(folder: Path, command: str, target: str, *arguments: str) -> None:
    """Runs the compiler of the wheel for another machine."""
    program = str(Path(ZIG.origin).parent / "zig")
    subprocess.run(
        [program, command, "-target", target, *arguments], cwd=folder, check=True
    )


def objects(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.o"))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "aarch64-macos"])
def test_the_run_time_compiles_for_arm64(target: str, tmp_path: Path) -> None:
    sources = [str(PROGRAM), *RUNTIME]

    zig(tmp_path, "clang", target, *compiler_flags.FLAGS, "-DKERNELS=", "-c", *sources)

    assert objects(tmp_path) == [f"{Path(source).stem}.o" for source in sources]


@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "aarch64-macos"])
@pytest.mark.parametrize("mode", [(), compiler_flags.TRACE_FLAGS])
def test_a_kernel_compiles_for_arm64(
    target: str, mode: Sequence[str], tmp_path: Path
) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text(KERNEL)
    flags = (*compiler_flags.FLAGS, *compiler_flags.METAL_FLAGS, *mode, *INCLUDE)

    zig(tmp_path, "clang", target, *flags, "-c", str(source))

    assert objects(tmp_path) == ["kernel.o"]


INDEX = "uint i = thread_position_in_grid.x;\n"
KERNELS = {
    "meetings": """
    threadgroup float tile[64];
    float sum = simd_sum(a[i]) + simd_shuffle_xor(a[i], 5);
    tile[i] = sum + simd_prefix_inclusive_sum(1.0f);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = tile[63 - i];
    """,
    "matrices": """
    simdgroup_float8x8 c, d(0.0f);
    simdgroup_half8x8 h;
    simdgroup_load(c, a);
    for (ushort e = 0; e < 2; ++e) {
      h.thread_elements()[e] = c.thread_elements()[e];
    }
    if (i < 32) {
      simdgroup_multiply_accumulate(d, h, h, c);
      simdgroup_store(d, out);
    }
    """,
    "rounding": """
    half h = half(a[i]) * 0.1h;
    bfloat b = bfloat(a[i]) * 0.1bf;
    out[i] = i < 32 ? float(h) : float(b);
    """,
    "denormals": "out[i] = a[i] * 1e-20f * 1e-20f;",
    "vectors": """
    float4 v = *(const device float4*)(a + 4 * (i / 4));
    out[i] = dot(v, v.wzyx) + float(half4(v).y) + popcount(i) + exp2(v.x - v.w);
    """,
    "handed": """
    threadgroup atomic_uint turn;
    if (i == 0) { atomic_store_explicit(&turn, 0u, memory_order_relaxed); }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    while (atomic_load_explicit(&turn, memory_order_relaxed) != 63 - i) {}
    out[i] = atomic_fetch_add_explicit(&turn, 1u, memory_order_relaxed);
    """,
    "outside": "out[i] = a[i < 9 ? i : i + 4096];",
    "readonly": "if (i == 3) { ((device float*)a)[2] = 1; }",
    "shifted": "out[i] = 1 << (int(a[i]) + 30);",
    "divided": "out[i] = 5 / (7 - int(a[i]));",
    "deadlock": "if (i < 40) { threadgroup_barrier(mem_flags::mem_device); }",
}
"""What is run, each on 64 threads in a threadgroup: floats `a` in, floats `out` out."""


def translation(name: str, source: str) -> str:
    """A kernel as MLX and the emulator write it."""
    kernel = mx.fast.metal_kernel(name, ["a"], ["out"], INDEX + source)
    call = {
        "output_shapes": [(64,)],
        "output_dtypes": [mx.float32],
        "grid": (64, 1, 1),
        "threadgroup": (64, 1, 1),
    }
    found = record(lambda a: kernel(inputs=[a], **call), [mx.zeros(64)])
    return translate(found.kernel, found.text).text


@dataclass(frozen=True)
class Ending:
    """How a kernel ended, and its output, float32 [64]."""

    fault: Fault
    thread: int
    offset: int
    instruction: int
    out: np.ndarray


@functools.cache
def build_program(folder: Path) -> Path:
    """An arm64 program of the run time and all kernels."""
    flags = (
        *compiler_flags.FLAGS,
        *compiler_flags.METAL_FLAGS,
        "-fno-sanitize-merge",
        *INCLUDE,
    )
    for name, source in KERNELS.items():
        (folder / f"{name}.cpp").write_text(translation(name, source))
        renamed = f"-Dmslemu_kernel={name}"
        zig(folder, "clang", TARGET, *flags, renamed, "-c", f"{name}.cpp")
    names = "".join(f"KERNEL({name})" for name in KERNELS)
    main = (f"-DKERNELS={names}", str(PROGRAM))
    zig(folder, "clang", TARGET, *compiler_flags.FLAGS, "-c", *RUNTIME, *main)
    zig(folder, "cc", TARGET, "-static", *objects(folder), "-o", "program")
    return folder / "program"


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ending]:
    """What an arm64 processor, or QEMU, makes of the kernels."""
    program = build_program(tmp_path_factory.mktemp("arm64"))
    answer = subprocess.run(
        [str(QEMU), str(program)], capture_output=True, text=True, check=True
    )
    found = {}
    for line in answer.stdout.splitlines():
        name, fault, *numbers = line.split()
        out = np.array([float.fromhex(x) for x in numbers[3:]], np.float32)
        found[name] = Ending(Fault(int(fault)), *map(int, numbers[:3]), out)
    return found


A = np.arange(64, dtype=np.float32)


def bfloat(values: np.ndarray) -> np.ndarray:
    """Rounds to the nearest, ties to even; MLX would evaluate in a collection."""
    bits = values.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).view(np.float32)


def expected_outputs() -> dict[str, np.ndarray]:
    lane = np.arange(64) % 32
    sums = A.reshape(2, 32).sum(axis=1).repeat(32)
    matrix = A.reshape(8, 8)
    v = A.reshape(16, 4)
    dot = (v * v[:, ::-1]).sum(axis=1) + v[:, 1] + np.float32(0.125)
    halves = A.astype(np.float16) * np.float16(0.1)
    bfloats = bfloat(bfloat(A) * bfloat(np.float32([0.1])))
    return {
        "meetings": (sums + A[np.arange(64) ^ 5] + lane + 1)[::-1],
        "matrices": (matrix @ matrix + matrix).ravel(),
        "rounding": np.where(A < 32, halves.astype(np.float32), bfloats),
        "denormals": np.zeros(64),
        "vectors": dot.repeat(4) + [int(i).bit_count() for i in range(64)],
        "handed": A[::-1],
    }


@runs
@pytest.mark.parametrize("kernel", expected_outputs())
def test_a_kernel_is_right_on_arm64(kernel: str, endings: dict[str, Ending]) -> None:
    assert endings[kernel].fault == Fault.NONE
    np.testing.assert_array_equal(endings[kernel].out, expected_outputs()[kernel])


@runs
@pytest.mark.parametrize(
    ("kernel", "fault", "thread"),
    [
        ("outside", Fault.ACCESS, 9),
        ("readonly", Fault.ACCESS, 3),
        ("shifted", Fault.INSTRUCTION, 2),
        ("divided", Fault.INSTRUCTION, 7),
        ("deadlock", Fault.DEADLOCK, 0),
    ],
)
def test_a_fault_is_found_on_arm64(
    kernel: str, fault: Fault, thread: int, endings: dict[str, Ending]
) -> None:
    assert (endings[kernel].fault, endings[kernel].thread) == (fault, thread)


@runs
def test_faults_on_arm64_tell_the_place_and_the_check(
    endings: dict[str, Ending],
) -> None:
    assert endings["outside"].offset == 4 * (9 + 4096)
    assert endings["readonly"].offset == 8
    assert endings["shifted"].instruction == 0xD4200000 | (0x5500 + 20) << 5
    assert endings["divided"].instruction == 0xD4200000 | (0x5500 + 3) << 5
