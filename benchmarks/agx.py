"""Registers, issue slots and spills of Metal kernels, counted with an open compiler.

It is Mesa's for the GPU of M1 and M2, and no part of this repository: AGX_HOME is a
folder with its program `agxkernel.py` and, in `root`, what its set-up has built. The
program turns Metal into C++ for OpenCL by text substitution, so this module spells a
few things as it expects them. Nothing is executed, and Apple's compiler may count
otherwise: the figures rank variants.
"""

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
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
LEVELS = ("-O2", "-O0")
"""Levels of optimization before Mesa's own; the better result counts."""
MATRIX_SLOTS = 16
"""Issue slots of an 8x8 product, by arithmetic."""
CONVERSION = re.compile(
    r"(?<![\w.<>])((?:float|half|u?int|u?short|u?char|bfloat)[24]|vec<\w+, ?\d>|Vec4)\("
)
"""Conversions of a vector, or vectors made of values."""
SPELLINGS = {
    "const constant int32_t*": "const thread int32_t*",
    "const constant Shape*": "const thread Shape*",
    "const constant Schedule*": "const thread Schedule*",
    " abs(": " fabs(",
    "*abs(": "*fabs(",
}
"""What the program does not take in our kernels, and what it takes instead."""
PRELUDE = """
#define MSL_PACKED(type, size) \\
  typedef type packed_##type __attribute__((aligned(size)));
MSL_PACKED(half4, 2) MSL_PACKED(float4, 4) MSL_PACKED(uint2, 4) MSL_PACKED(uint3, 4)
MSL_PACKED(uint4, 4) MSL_PACKED(uchar4, 1) MSL_PACKED(ushort2, 2) MSL_PACKED(ushort4, 2)
template <bool SCALAR> struct msl_make {
  template <typename T, typename U> MSL_MEMBER static T of(U v) { return (T)(v); }
  template <typename T, typename A, typename B> MSL_MEMBER static T of(A a, B b) {
    T result;
    result.x = a;
    result.y = b;
    return result;
  }
};
template <> struct msl_make<false> {
  template <typename T, typename U> MSL_MEMBER static T of(U v) {
    return __builtin_convertvector(v, T);
  }
  template <typename T, typename A> MSL_MEMBER static T of(A a, A b) {
    T result = {a, b};
    return result;
  }
};
template <typename T, typename U> MSL_INLINE T make_as(U v) {
  return msl_make<__is_arithmetic(U)>::template of<T>(v);
}
template <typename T, typename A, typename B> MSL_INLINE T make_as(A a, B b) {
  return msl_make<__is_arithmetic(A)>::template of<T>(a, b);
}
template <typename T, typename A> MSL_INLINE T make_as(A a, A b, A c, A d) {
  T result = {a, b, c, d};
  return result;
}
template <typename T, typename A, typename B> MSL_INLINE T make_as(A a, B b, B c) {
  T result = {a.x, a.y, b, c};
  return result;
}
"""
"""What the program lacks."""
BFLOAT_VECTORS = """
struct msl_pair { bfloat x, y; };
struct msl_quad { bfloat x, y, z, w; };
template <> struct msl_vec<bfloat, 2> { typedef msl_pair type; };
template <> struct msl_vec<bfloat, 4> { typedef msl_quad type; };
"""
AS_HALVES = """
template <> struct msl_vec<bfloat, 2> { typedef half2 type; };
template <> struct msl_vec<bfloat, 4> { typedef half4 type; };
"""
"""Vectors of bfloats where x is bfloat16: those of halves, which this GPU has too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A kernel as `mx.fast.metal_kernel` takes it.

    Attributes:
        inputs: Name and Metal type of each buffer; a type that ends in "&" is a number
            that is passed by value.
        outputs: Likewise.
        source: The body.
        header: What precedes it.
        template: Metal types, integers and flags by name.
        threadgroup: Threads of a threadgroup.
    """

    inputs: Sequence[tuple[str, str]]
    outputs: Sequence[tuple[str, str]]
    source: str
    header: str
    template: Mapping[str, str | int | bool] = field(default_factory=dict)
    threadgroup: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of one kernel.

    Attributes:
        registers: 16-bit registers of a thread, as allocated.
        alive: Those that are alive at once, at most.
        slots: Issue slots of an iteration of each innermost loop, in the text's order;
            an 8x8 product takes `MATRIX_SLOTS`, loads and waits none.
        matrix: 8x8 products of an iteration of each of these loops.
        spills: Loads and stores of spilled registers.
        code: Bytes of code.
    """

    registers: int
    alive: int
    slots: tuple[int, ...]
    matrix: tuple[int, ...]
    spills: int
    code: int

    def slots_with(self, matrix: int) -> int:
        """Returns the slots of the longest loop with so many 8x8 products."""
        pairs = zip(self.slots, self.matrix, strict=True)
        return max(slots for slots, products in pairs if products == matrix)


def missing() -> str | None:
    """Returns why nothing can be counted, or None."""
    folder = os.environ.get("AGX_HOME")
    if not folder:
        return "not installed (AGX_HOME is not set)"
    if not (Path(folder) / "agxkernel.py").is_file():
        return f"not installed (AGX_HOME={folder} has no agxkernel.py)"
    return None


def count(launch: Launch) -> Counts:
    """Counts a launch of one of our Metal kernels.

    Raises:
        ValueError: If the compiler refuses it at both levels.
    """
    return counts(text_of(launch))


def counts(*forms: Text, levels: Sequence[str] = LEVELS) -> Counts:
    """Counts a kernel: the form and level with the fewest spills, then slots.

    Args:
        forms: Equal forms of its text, such as with loops unrolled.
        levels: The levels of optimization to try.

    Raises:
        ValueError: If the compiler refuses all of them, or is not installed.
    """
    results = [
        result
        for form, level in product(forms, levels)
        for result in _program().kernel_stats(_kernel(form), (level,))
    ]
    found = [_counts(result) for result in results if "kernels" in result]
    if not found:
        raise ValueError(
            f"the compiler refuses the kernel: {results[0]['error'][:2000]}"
        )
    return min(found, key=lambda each: (each.spills, max(each.slots), each.registers))


def text_of(launch: Launch) -> Text:
    """Returns the text of a launch, as the program takes it."""
    scalars, body = _by_value(launch)
    return Text(
        inputs=[*_arrays(launch), *scalars],
        outputs=[(output.name, TYPES[output.dtype]) for output in launch.outputs],
        source=_replaced(body),
        header=_header(launch),
        template={name: _value(value) for name, value in launch.template},
        threadgroup=launch.threadgroup,
    )


def _header(launch: Launch) -> str:
    """Returns the header; fragments of bfloats are compiled as those of halves."""
    text = _replaced(launch.source.header)
    if launch.inputs[0].dtype != "bfloat16":
        return BFLOAT_VECTORS + text
    text = text.replace("typedef bfloat ", "typedef half ")
    return AS_HALVES + text.replace("load_operand(bfloat,", "load_operand(half,")


def _value(value: str | int | bool) -> str | int | bool:
    return TYPES[value] if isinstance(value, str) else value


def _arrays(launch: Launch) -> list[tuple[str, str]]:
    numbers = dict(launch.integers)
    names = launch.source.input_names
    return [
        (name, TYPES[operand.dtype])
        for name, operand in zip(names, launch.inputs, strict=True)
        if name not in numbers
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


def _replaced(text: str) -> str:
    for metal, spelled in SPELLINGS.items():
        text = text.replace(metal, spelled)
    return text


@cache
def _program() -> Any:
    reason = missing()
    if reason is not None:
        raise ValueError(f"the compiler that counts slots: {reason}")
    sys.path.append(os.environ["AGX_HOME"])
    return importlib.import_module("agxkernel")


def _kernel(text: Text) -> Any:
    return _program().Kernel(
        name="counted",
        inputs=text.inputs,
        outputs=text.outputs,
        source=_made(text.source),
        header=PRELUDE + _made(text.header),
        template=text.template,
        threadgroup=text.threadgroup,
    )


def _made(text: str) -> str:
    """Returns a text whose vectors are made by functions: OpenCL's do not convert."""
    return CONVERSION.sub(lambda match: f"make_as<{match[1]}>(", text)


def _counts(result: Mapping[str, Any]) -> Counts:
    (kernel,) = result["kernels"]
    loops = [
        loop["per_iteration"] for loop in kernel["loop_bodies"] if loop["innermost"]
    ]
    return Counts(
        registers=kernel["max_reg16"],
        alive=kernel["demand16"],
        slots=tuple(loop["est_alu_cycles"] for loop in loops),
        matrix=tuple(loop["simd_matrix"] for loop in loops),
        spills=kernel["total"]["stack_store"] + kernel["total"]["stack_load"],
        code=kernel["code_bytes"],
    )
