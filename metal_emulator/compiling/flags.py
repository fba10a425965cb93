"""Flags of clang, for the runtime and for kernels."""

import platform
import re

FLAGS = (
    "-std=c++17",
    "-O2",
    "-gline-tables-only",
    "-fPIC",
    "-ffreestanding",
    "-nostdinc",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-stack-protector",
    "-fno-threadsafe-statics",
    "-fno-strict-aliasing",
    "-fno-omit-frame-pointer",
    "-fno-caret-diagnostics",
    "-fno-color-diagnostics",
    "-fno-crash-diagnostics",
)
"""Flags of every build: no system headers, no C++ runtime, line tables."""

CHECKS = "alignment,integer-divide-by-zero,shift-exponent"
"""Undefined behaviour that traps. array-bounds is omitted: it doubles the compile time
of unrolled loops over private arrays."""

METAL_FLAGS = (
    # Round half and bfloat after every operation; constants are single precision.
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    "-Xclang",
    "-cl-single-precision-constant",
    "-ffp-contract=off",
    # Host threads flush float32 denormals; constant folding must agree.
    "-Xclang",
    "-fdenormal-fp-math-f32=preserve-sign,preserve-sign",
    f"-fsanitize={CHECKS}",
    f"-fsanitize-trap={CHECKS}",
    "-fstack-clash-protection",
    # Keep endless loops, which the time limit reports.
    "-fno-finite-loops",
    # Equal calls of two branches are two places, although clang 22 merges them: it
    # ignores `nomerge` where it hoists whole branches.
    "-mllvm",
    "-simplifycfg-hoist-common=0",
    # A tail call would remove the caller from the stack trace.
    "-fno-optimize-sibling-calls",
    "-Wno-everything",
    # Metal demands constant initializers of program-scope variables. Others would run
    # when the library is loaded, where nothing stops or reports them.
    "-Werror=global-constructors",
)
"""Flags of a Metal kernel."""

TRACE_FLAGS = (
    "-DMSLEMU_TRACE",
    # Call the runtime at every access; the sanitizer's own runtime is not linked.
    "-Xclang",
    "-fsanitize=thread",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-mllvm",
    "-tsan-instrument-atomics=0",
    "-mllvm",
    "-tsan-instrument-read-before-write=1",
    # Merged code of two lines would have no line.
    "-mllvm",
    "-simplifycfg-sink-common=0",
    "-mllvm",
    "-enable-tail-merge=0",
    # Accesses of more than 16 bytes would not be instrumented.
    "-fno-vectorize",
    "-fno-slp-vectorize",
    # Private arrays, and private variables that are never set (floats become NaN).
    "-fsanitize=array-bounds",
    "-fsanitize-trap=array-bounds",
    "-ftrivial-auto-var-init=pattern",
    "-Werror=uninitialized",
    "-Wno-sometimes-uninitialized",
)
"""Additional flags of a traced kernel."""


def machine_flags() -> tuple[str, ...]:
    """Returns the instruction set: x86-64-v3, or the baseline of arm64."""
    return ("-march=x86-64-v3",) if platform.machine() in ("x86_64", "AMD64") else ()


_TENSOR_INCLUDE = re.compile(
    r"^[ \t]*#[ \t]*include[ \t]*<(MetalPerformancePrimitives/|metal_tensor>)", re.M
)
TENSOR_FLAGS = (
    # A descriptor is a template argument.
    "-std=c++20",
    "-D__HAVE_TENSOR__",
)
"""Additional flags of a kernel with tensor operations."""


def uses_tensors(text: str) -> bool:
    """Returns whether a text includes the headers of Metal 4's tensor operations."""
    return _TENSOR_INCLUDE.search(text) is not None
