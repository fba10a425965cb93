"""Which names of Metal's language and library a text uses.

Metal's names are those that the static check declares: what it does not know, no text
that passes it can use.
"""

import re
import subprocess
from dataclasses import dataclass
from functools import cache

from metal_emulator.compiling import build, compiler
from metal_emulator.language.tokens import Tokens

STATIC = build.INCLUDE / "static"
TENSOR = STATIC / build.TENSOR
KEYWORDS = ("device", "threadgroup", "constant", "thread", "half", "bfloat")
NO_FUNCTION = frozenset(
    {"if", "for", "while", "switch", "return", "sizeof", "decltype", "operator"}
    | {"static_assert", "defined", "alignas", "__attribute__"}
)
ATTRIBUTE = re.compile(r"METAL_FUNC uint3? (\w+_(?:in|per)_\w+|grid_\w+)\(\)")
PRAGMA = re.compile(r'(?:_Pragma\("|#\s*pragma )(clang loop [^"\n]*)')


@dataclass(frozen=True)
class Vocabulary:
    """Metal's names: of functions, and of everything else."""

    functions: frozenset[str]
    others: frozenset[str]


def _declared(header: str) -> Vocabulary:
    """Names that a header of the static check declares."""
    found = compiler.find()
    assert found is not None
    flags = ("-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-E", "-P")
    text = subprocess.run(
        (*found.clang, *flags, "-I", str(STATIC), str(STATIC / header)),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return _names(Tokens(text))


@cache
def tensor_vocabulary() -> Vocabulary:
    """The names of Metal 4's tensor operations."""
    names, plain = _declared(f"{build.TENSOR}/matmul2d.h"), _declared("kernel.h")
    namespaces = {"mpp", "tensor_ops"}
    return Vocabulary(
        names.functions - plain.functions,
        frozenset({*names.others - plain.others, *namespaces}),
    )


@cache
def vocabulary() -> Vocabulary:
    """Metal's names, out of the static check's headers, but for tensor operations."""
    names = _declared("kernel.h")
    macros = [
        name
        for header in (*STATIC.glob("*.h"), build.INCLUDE / "constants.h")
        for name in re.findall(r"^#define (\w+)", header.read_text(), re.MULTILINE)
        if not name.startswith("EMU_")
    ]
    # MLX writes attributes into a kernel's signature; the emulator lists them.
    attributes = ATTRIBUTE.findall((build.INCLUDE / "kernel.h").read_text())
    others = names.others | {*macros, *KEYWORDS, *attributes}
    return Vocabulary(names.functions, others)


def _names(tokens: Tokens) -> Vocabulary:
    """Names that a text declares outside of the namespace `emu`."""
    functions, others = set(), set()
    at = tokens.after(-1)
    class_end = -1
    while at < len(tokens):
        word, following = tokens.text(at), tokens.after(at)
        in_list = tokens.text(tokens.before(at)) in ("<", ",")
        if word == "namespace" and tokens.text(following) == "emu":
            at = tokens.closing(tokens.after(following))
        elif word == "enum":
            name = following
            if tokens.text(name) == "class":
                name = tokens.after(name)
            others |= {tokens.text(name), *_enumerators(tokens, name)}
            at = name
        elif word in ("struct", "class") and not in_list:
            others.add(tokens.text(following))
            class_end = max(class_end, _class_end(tokens, following))
        elif word == "using" and at > class_end and tokens.named(following):
            others.add(tokens.text(following))
        elif tokens.text(following) == "(" and _is_declared(tokens, at):
            functions.add(word)
        at = tokens.after(at)
    others.discard("namespace")
    return Vocabulary(frozenset(functions - NO_FUNCTION - others), frozenset(others))


def _is_declared(tokens: Tokens, name: int) -> bool:
    """Whether a type stands before a function's name."""
    before = tokens.before(name)
    has_type = tokens.named(before) or tokens.text(before) in ("&", ">")
    return has_type and tokens.text(before) not in ("return", "operator")


def _class_end(tokens: Tokens, at: int) -> int:
    while tokens.text(at) not in ("{", ";"):
        at = tokens.after(at)
    return tokens.closing(at) if tokens.text(at) == "{" else at


def _enumerators(tokens: Tokens, at: int) -> set[str]:
    while tokens.text(at) != "{":
        at = tokens.after(at)
    return {tokens.text(item) for item in tokens.items(at, tokens.closing(at))} - {"}"}


@cache
def used(text: str) -> set[str]:
    """Metal's names that a text uses: functions, types, attributes, pragmas."""
    return {*PRAGMA.findall(text), *_found(text, vocabulary())}


@cache
def used_tensors(text: str) -> set[str]:
    """The names of tensor operations that a text uses."""
    return _found(text, tensor_vocabulary())


def _found(text: str, known: Vocabulary) -> set[str]:
    tokens = Tokens(text)
    found = set()
    for at in range(len(tokens)):
        if not tokens.named(at):
            continue
        word = tokens.text(at)
        is_member = tokens.text(tokens.before(at)) in (".", "->")
        is_function = word in known.functions and _is_called(tokens, at)
        if is_function or (word in known.others and not is_member):
            found.add(word)
    return found


def _is_called(tokens: Tokens, at: int) -> bool:
    following = tokens.after(at)
    if tokens.text(following) == "<":
        following = tokens.after(max(following, tokens.closing_angle(following)))
    return tokens.text(following) == "("
