"""Registers, issue slots and spills of a kernel, by an open compiler for the M1's GPU.

The compiler (Mesa's, for the G13 of M1 and M2) is an optional aid that is not part of
this repository. The environment variable AGX_HOME names its folder, which holds its
program `agxkernel.py` and, in `root`, what its set-up has built. The figures rank
variants of kernels: Apple's compiler may give others, and nothing is executed.

The aid turns Metal into C++ for OpenCL. What it does not know is adapted here: vectors
that convert, and numbers of a plan, which are passed by value as Metal preloads them.
"""

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

SIZES = {
    "float": 4,
    "half": 2,
    "uint": 4,
    "int": 4,
    "ushort": 2,
    "short": 2,
    "uchar": 1,
    "char": 1,
}
"""Scalars that vectors have, and their bytes."""
LEVELS = ("-O2", "-O0")
"""Levels of optimisation before Mesa; the better result counts (see the aid)."""
_NAMES = "|".join(SIZES)
_CONSTRUCTOR = re.compile(rf"(?<![\w>.])({_NAMES})([24])\(")
_GENERIC = re.compile(r"\bvec<(\w+), ?([24])>\(")
_NUMBER = re.compile(r"work\.(\w+)=\w+\.\w+(!=0)?;")
_READ = re.compile(r"read_work\(shape, ?schedule\)")


@dataclass(frozen=True, kw_only=True)
class Text:
    """A kernel's body as `mx.fast.metal_kernel` takes it, and its instance.

    Attributes:
        inputs: Name and Metal type of each buffer; a type that ends in "&" is a number
            that is passed by value.
        outputs: Likewise.
        source: The body.
        header: What precedes it.
        template: Metal types, integers and flags by name.
        threads: Threads of a threadgroup.
    """

    inputs: Sequence[tuple[str, str]]
    outputs: Sequence[tuple[str, str]]
    source: str
    header: str
    template: Mapping[str, str | int | bool] = field(default_factory=dict)
    threads: int


@dataclass(frozen=True, order=True, kw_only=True)
class Loop:
    """One iteration of an innermost loop of a simdgroup.

    Attributes:
        slots: Issue slots; loads and waits take none, an 8x8 product 16.
        matrix: 8x8 products.
    """

    slots: int
    matrix: int


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What the compiler says of a kernel.

    Attributes:
        registers: 16-bit registers of a thread.
        spills: Stores of registers to memory.
        loops: The innermost loops, in the order of the text.
    """

    registers: int
    spills: int
    loops: tuple[Loop, ...]

    @property
    def most(self) -> Loop:
        """The loop with the most slots: the main one."""
        return max(self.loops)

    def with_matrix(self, matrix: int) -> Loop:
        """The longest loop with so many 8x8 products in an iteration."""
        return max(loop for loop in self.loops if loop.matrix == matrix)


def missing() -> str | None:
    """Returns why nothing can be counted, or None."""
    folder = os.environ.get("AGX_HOME")
    if not folder:
        return "not installed (AGX_HOME is not set)"
    if not (Path(folder) / "agxkernel.py").is_file():
        return f"not installed (AGX_HOME={folder} has no agxkernel.py)"
    return None


def counts(*texts: Text, levels: Sequence[str] = LEVELS) -> Counts:
    """Returns the counts of a kernel.

    Args:
        texts: Equal forms of it, such as with loops unrolled. The form and the level
            of optimisation with the fewest spills, then slots, count.
        levels: The levels of optimisation to try.

    Raises:
        ValueError: If none compiles.
    """
    found, errors = [], []
    for text, level in product(texts, levels):
        (result,) = _aid().kernel_stats(_kernel(text), (level,))
        if "error" in result:
            errors.append(result["error"])
        else:
            found.append(_counts(result["kernels"][0]))
    if not found:
        first = errors[0].strip().splitlines()
        cause = next((line for line in first if "error" in line), first[-1])
        raise ValueError(f"the AGX aid compiles no form of the kernel: {cause}")
    return min(found, key=lambda each: (each.spills, each.most.slots, each.registers))


def by_value(text: Text) -> Text:
    """Returns one of our kernels with its plan's numbers passed by value.

    Mesa preloads numbers only if they are arguments; Metal preloads small arrays.
    """
    fields = _NUMBER.findall(text.header)
    parameters = ",".join(f"int plan_{name}" for name, _ in fields)
    body = "".join(f"work.{name}=plan_{name}{test};" for name, test in fields)
    function = f"Work given_work({parameters}){{Work work;{body}return work;}}"
    header = text.header.rstrip().removesuffix("}") + f"METAL_FUNC {function}\n}}\n"
    names = [f"given_{name}" for name, _ in fields]
    return replace(
        text,
        inputs=[*text.inputs, *((name, "int&") for name in names)],
        source=_READ.sub(f"given_work({','.join(names)})", text.source),
        header=header,
    )


@cache
def _aid() -> Any:
    reason = missing()
    if reason is not None:
        raise ValueError(f"AGX aid: {reason}")
    sys.path.append(os.environ["AGX_HOME"])
    return importlib.import_module("agxkernel")


def _kernel(text: Text) -> Any:
    return _aid().Kernel(
        name="counted",
        inputs=text.inputs,
        outputs=text.outputs,
        source=_adapted(text.source),
        header=_conversions() + _adapted(text.header),
        template=text.template,
        threadgroup=(text.threads, 1, 1),
    )


def _counts(kernel: Mapping[str, Any]) -> Counts:
    loops = [each for each in kernel["loop_bodies"] if each["innermost"]]
    trips = [each["per_iteration"] for each in loops]
    return Counts(
        registers=kernel["max_reg16"],
        spills=kernel["total"]["stack_store"],
        loops=tuple(
            Loop(slots=trip["est_alu_cycles"], matrix=trip["simd_matrix"])
            for trip in trips
        ),
    )


def _adapted(text: str) -> str:
    """Returns a text whose vectors are made by functions: OpenCL's do not convert."""
    text = _GENERIC.sub(r"vector_of<\1>::of\2(", text)
    text = _CONSTRUCTOR.sub(r"make_\1\2(", text)
    return text.replace("const uint3 loaded", "uint3 loaded").replace(
        "abs(x)", "fabs(x)"
    )


@cache
def _conversions() -> str:
    """Returns the functions that make vectors of two and of four, and packed ones."""
    lines = ["#define UNROLL_ 1", "template<typename T>struct vector_of{};"]
    lines.append("typedef uint3 packed_uint3 __attribute__((aligned(4)));")
    for type_, size in SIZES.items():
        lines += [line for count in (2, 4) for line in _of_type(type_, size, count)]
        lines.append(
            f"template<>struct vector_of<{type_}>{{"
            + "".join(_members(type_, count) for count in (2, 4))
            + "};"
        )
    return "\n".join(lines) + "\n"


def _of_type(type_: str, size: int, count: int) -> list[str]:
    vector, make = f"{type_}{count}", f"MSL_INLINE {type_}{count} make_{type_}{count}"
    parts = "ABCD"[:count]
    types = ",".join(f"typename {part}" for part in parts)
    parameters = ",".join(f"{part} {part.lower()}" for part in parts)
    values = ",".join(f"({type_}){part.lower()}" for part in parts)
    lines = [
        f"typedef {vector} packed_{vector} __attribute__((aligned({size})));",
        f"{make}({vector} v){{return v;}}",
        f"template<{types}>{make}({parameters}){{return ({vector})({values});}}",
    ]
    if count == 4:
        pair = f"{type_}2"
        lines.append(f"{make}({pair} a,{pair} b){{return ({vector})(a,b);}}")
        lines.append(
            f"{make}({pair} a,{type_} b,{type_} c){{return ({vector})(a,b,c);}}"
        )
    for other in SIZES:
        lines.append(f"{make}({other} v){{return ({vector})(({type_})v);}}")
        if other != type_:
            convert = f"convert_{vector}(v)"
            lines.append(f"{make}({other}{count} v){{return {convert};}}")
    return lines


def _members(type_: str, count: int) -> str:
    head = f"MSL_INLINE static {type_}{count} of{count}"
    call = f"make_{type_}{count}"
    return (
        f"template<typename A>{head}(A a){{return {call}(a);}}"
        f"template<typename A,typename B>{head}(A a,B b){{return {call}(a,b);}}"
    )
