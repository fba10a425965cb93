"""Selection of the C++ compiler that compiles Metal kernels."""

from __future__ import annotations

import functools
import importlib.util
import platform
import re
import sys
from pathlib import Path

from metal_emulator.compiling import build, clangs
from metal_emulator.compiling.clangs import Compiler
from metal_emulator.compiling.limited import RefusedError

PROBE = """
#include "kernel.h"
template <class T>
void products(T* x, float* y) {
  simdgroup_matrix<T, 8, 8> a;
  simdgroup_float8x8 c(0.0f);
  simdgroup_load(a, x);
  simdgroup_multiply_accumulate(c, a, a, c);
  simdgroup_store(c, y);
}
template <class T>
void elements(T* x, float* y) {
  uint i = emu::attribute::thread_position_in_grid().x;
  vec<T, 4> v = *reinterpret_cast<vec<T, 4>*>(x + 4 * i);
  v = fma(clamp(v, T(0), T(1)), v, T(2)) + max(abs(v), exp(v));
  T least = simd_min(min3(v.x, v.y, fmin(v.z, v.w)));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint other = simd_shuffle_xor(as_type<uint>(y[i]), 1u);
  y[i] = simd_sum(float(least)) + as_type<float>(other);
}
extern "C" void mslemu_kernel() {
  products<half>(emu::pointer(0), emu::pointer(2));
  products<bfloat>(emu::pointer(1), emu::pointer(2));
  elements<half>(emu::pointer(0), emu::pointer(2));
  elements<bfloat>(emu::pointer(1), emu::pointer(2));
  elements<float>(emu::pointer(2), emu::pointer(2));
}
"""
"""A kernel that a compiler must compile to be used: types, math, simdgroup operations
and matrices of the shim headers. It is not run."""
INSTALL = 'pip install ".[emulator]" in a checkout of mlx_marlin'
_MAX_CHARACTERS = 300
"""Maximum length of a compiler's message."""


@functools.cache
def search() -> tuple[Compiler | None, tuple[str, ...]]:
    """Tries the compilers in order, once per process.

    A compiler whose libraries are in the cache is not run.
    """
    failures: list[str] = []
    for candidate in clangs.candidates():
        try:
            found = candidate.make()
            build.runtime_library(found)
            build.kernel_library(found, PROBE)
        except (OSError, ValueError, RefusedError) as error:
            failures.append(f"{candidate.name} does not work: {_summary(str(error))}")
        else:
            return found, tuple(failures)
    return None, tuple(failures)


def find() -> Compiler | None:
    """Returns the first compiler that works, or None.

    The candidates are `MLX_MARLIN_CLANG` if it is set, else the wheel `ziglang` and the
    system's clangs.
    """
    return search()[0]


@functools.cache
def unavailable() -> str | None:
    """Returns why the emulator cannot run on this machine, or None."""
    for module in ("numpy", "elftools"):
        if importlib.util.find_spec(module) is None:
            return f"the Python module {module!r} is missing: {INSTALL}"
    if sys.platform not in ("linux", "darwin"):
        return f"it runs on Linux and macOS, not on {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"):
        return f"it runs on x86-64 and arm64, not on {platform.machine()}"
    if _lacks_instructions():
        return "this processor lacks AVX2, FMA or F16C"
    found, failures = search()
    if found is not None:
        return None
    oldest = clangs.OLDEST_CLANG
    none_found = f"there is neither the wheel 'ziglang' nor a clang >= {oldest}"
    return "; ".join(failures) or f"{none_found}: {INSTALL}"


def _lacks_instructions() -> bool:
    """Returns whether this x86-64 processor lacks `build.machine_flags`."""
    cpuinfo = Path("/proc/cpuinfo")
    if not build.machine_flags() or not cpuinfo.exists():
        return False
    found = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return found is not None and not {"avx2", "f16c", "fma"} <= set(found[1].split())


def _summary(message: str) -> str:
    """Returns the first error of a compiler's message, or its first line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    return (errors or lines or ["it prints nothing"])[0][:_MAX_CHARACTERS]
