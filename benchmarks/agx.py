"""Registers and issue slots of our launches, counted with an open compiler.

It is Mesa's for the first Apple generation. The compiler and the scripts that drive it
are no part of this repository: `AGX_HOME` is the folder of the compiler, `AGX_TOOLS`
that of the scripts. The scripts translate Metal to OpenCL by text substitution, so this
module spells a few things as they expect them. Nothing is executed, and Apple's
compiler may count otherwise.
"""

import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_marlin.backends.launch import Launch

TYPES = {
    "float16": "half",
    "bfloat16": "bfloat",
    "float32": "float",
    "uint32": "uint32_t",
    "int32": "int32_t",
    "uint8": "uchar",
    "uint16": "ushort",
}
"""Names of dtypes in Metal."""
CONVERSION = re.compile(
    r"(?<![\w.<])((?:float|half|u?int|u?short|bfloat)[24]|vec<\w+, ?\d>|Vec4)\("
)
"""Conversions of a vector, or vectors made of values."""
SPELLINGS = {
    "const constant int32_t*": "const thread int32_t*",
    "const constant Shape*": "const thread Shape*",
    "const constant Schedule*": "const thread Schedule*",
    " abs(": " fabs(",
    "*abs(": "*fabs(",
}
"""What the aid does not take, and what it takes instead."""
PRELUDE = """
#define MSL_PACKED(type, size) typedef type packed_##type __attribute__((aligned(size)));
MSL_PACKED(half4, 2) MSL_PACKED(float4, 4) MSL_PACKED(uint2, 4) MSL_PACKED(uint3, 4)
MSL_PACKED(uint4, 4) MSL_PACKED(uchar4, 1) MSL_PACKED(ushort2, 2) MSL_PACKED(ushort4, 2)
template <bool SCALAR> struct msl_make {
  template <typename T, typename U> MSL_MEMBER static T of(U v) { return (T)(v); }
};
template <> struct msl_make<false> {
  template <typename T, typename U> MSL_MEMBER static T of(U v) {
    return __builtin_convertvector(v, T);
  }
};
template <typename T, typename U> MSL_INLINE T make_as(U v) {
  return msl_make<__is_arithmetic(U)>::template of<T>(v);
}
template <typename T, typename A> MSL_INLINE T make_as(A a, A b) {
  T result = {a, b};
  return result;
}
template <typename T, typename A> MSL_INLINE T make_as(A a, A b, A c, A d) {
  T result = {a, b, c, d};
  return result;
}
template <> struct msl_vec<bfloat, 2> { typedef half2 type; };
template <> struct msl_vec<bfloat, 4> { typedef half4 type; };
"""
"""What the aid lacks. A vector of bfloats has the registers of one of halves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of one kernel.

    Attributes:
        registers: 16-bit registers of a thread.
        slots: Issue slots of an iteration of each innermost loop, in the text's order.
        spills: Loads and stores of spilled registers.
        code: Bytes of code.
    """

    registers: int
    slots: tuple[int, ...]
    spills: int
    code: int


def is_installed() -> bool:
    """Returns whether both folders are named."""
    return "AGX_HOME" in os.environ and "AGX_TOOLS" in os.environ


def count(launch: Launch) -> Counts:
    """Counts a launch: the better one of two levels of optimization.

    Args:
        launch: A launch of one of our Metal kernels.

    Raises:
        ValueError: If the compiler refuses it at both levels.
    """
    sys.path.append(os.environ["AGX_TOOLS"])
    aid = importlib.import_module("agxkernel")
    text = launch.source
    scalars, body = _by_value(launch)
    kernel = aid.Kernel(
        name="kernel_of_launch",
        inputs=[*_arrays(launch), *scalars],
        outputs=[(output.name, TYPES[output.dtype]) for output in launch.outputs],
        source=_spelled(body),
        header=PRELUDE + _spelled(text.header),
        template={name: _value(value) for name, value in launch.template},
        threadgroup=launch.threadgroup,
    )
    results = aid.kernel_stats(kernel)
    found = [_counts(result) for result in results if "kernels" in result]
    if not found:
        raise ValueError(f"{text.name}: {results[0]['error'][:2000]}")
    return min(found, key=lambda each: (each.spills, each.slots, each.registers))


def _value(value: str | int | bool) -> str | int | bool:
    return TYPES[value] if isinstance(value, str) else value


def _arrays(launch: Launch) -> list[tuple[str, str]]:
    numbers = dict(launch.integers)
    return [
        (operand.name, TYPES[operand.dtype])
        for operand in launch.inputs
        if operand.name not in numbers
    ]


def _by_value(launch: Launch) -> tuple[list[tuple[str, str]], str]:
    """Returns arguments for a plan's integers, and the body that reads them.

    Metal preloads such arrays. This compiler keeps only arguments in uniform registers.
    """
    body, scalars = launch.source.source, []
    for name, values in launch.integers:
        names = [f"{name}_{i}" for i in range(len(values))]
        scalars += [(each, "int32_t&") for each in names]
        body = f"const int32_t {name}[]={{{','.join(names)}}};\n{body}"
    return scalars, body


def _spelled(text: str) -> str:
    for metal, spelled in SPELLINGS.items():
        text = text.replace(metal, spelled)
    return CONVERSION.sub(lambda match: f"make_as<{match[1]}>(", text)


def _counts(result: dict[str, Any]) -> Counts:
    kernel = result["kernels"][0]
    loops = [loop["per_iteration"] for loop in _innermost(kernel["loop_bodies"])]
    return Counts(
        registers=kernel["max_reg16"],
        slots=tuple(loop["est_alu_cycles"] for loop in loops),
        spills=sum(loop["stack_store"] + loop["stack_load"] for loop in loops),
        code=kernel["code_bytes"],
    )


def _innermost(loops: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [loop for loop in loops if loop["innermost"]]
