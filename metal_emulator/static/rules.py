"""Rules of Metal that clang cannot check, checked on the tokens.

Clang assigns a default address space to unqualified pointers, accepts `fragment` as a
name, and sees threadgroup variables only after they are rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator

from metal_emulator.language import rewrite
from metal_emulator.language.declaration import STATEMENT_ENDS, is_declarator
from metal_emulator.language.tokens import Tokens

_SPACES = frozenset(
    {"device", "threadgroup", "constant", "thread", "threadgroup_imageblock"}
)
_QUALIFIERS = frozenset(
    {"const", "volatile", "constexpr", "static", "inline", "typename", "struct", "::"}
) | {
    "METAL_FUNC",
    "metal",
    "unsigned",
    "signed",
    "char",
    "short",
    "int",
    "long",
    *_SPACES,
}
_INTEGERS = ["char", "uchar", "short", "ushort", "int", "uint", "long", "ulong"]
_SIZED = [f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_SCALARS = frozenset(
    {"void", "bool", "half", "bfloat", "float", "float16_t", "bfloat16_t"}
    | {"complex64_t", "size_t", "unsigned", "signed", *_INTEGERS, *_SIZED}
    | {"atomic_int", "atomic_uint", "atomic_float"}
)
_MATRICES = frozenset(
    f"{scalar}{columns}x{rows}"
    for scalar in ("half", "float")
    for columns in (2, 3, 4)
    for rows in (2, 3, 4)
)
_TEMPLATES = frozenset({"vec", "packed_vec", "atomic", "simdgroup_matrix", "matrix"})
_UNSUPPORTED = {
    "goto": "Metal has no goto",
    "virtual": "virtual functions are not supported",
}
_RESERVED = frozenset({"kernel", "vertex", "fragment"})
_BEFORE_VALUE = frozenset([*".+-*/%=?|&!~^", "->", "return"])

_MISSING = "device, constant, threadgroup or thread is missing"

Finding = tuple[int, str]
"""A position in the text and a message."""


def findings(tokens: Tokens) -> Iterator[Finding]:
    """Finds violations of the rules."""
    line = 0
    lines = []
    for token in tokens:
        lines.append(line)
        line += token.text.count("\n")
    rules = (
        _unqualified,
        _reserved,
        _unsupported,
        _threadgroup_variables,
    )
    for rule in rules:
        for at, message in rule(tokens):
            yield lines[at], message


def _types(tokens: Tokens) -> frozenset[str]:
    """Returns the names of Metal's types and of types that the text declares."""
    names = set(_SCALARS | _TEMPLATES | _MATRICES | rewrite.VECTORS)
    for at in range(len(tokens)):
        word, name = tokens.text(at), tokens.after(at)
        if word == "using" and tokens.text(tokens.after(name)) != "=":
            continue
        if word in ("typename", "class", "struct", "using"):
            names.add(tokens.text(name))
        elif word == "typedef":
            names.add(_typedef_name(tokens, name))
    return frozenset(names - _values(tokens))


def _typedef_name(tokens: Tokens, at: int) -> str:
    """Returns the last name before the `;`."""
    last = at
    while tokens.text(at) not in (";", ""):
        last = at if tokens.named(at) else last
        at = tokens.after(at)
    return tokens.text(last)


def _values(tokens: Tokens) -> set[str]:
    """Returns names that the text also declares as values: `template <int T>`."""
    return {
        tokens.text(tokens.after(at))
        for at in range(len(tokens))
        if tokens.text(at) in _SCALARS and tokens.named(tokens.after(at))
    } - _SCALARS


def _type_end(tokens: Tokens, at: int, names: frozenset[str]) -> int:
    """Returns the last token of the type that begins at `at`, or -1."""
    dependent = tokens.text(tokens.before(at)) == "typename"
    if not tokens.named(at) or not (dependent or tokens.text(at) in names):
        return -1
    last = at
    while True:
        following = tokens.after(at)
        if tokens.text(following) == "<":
            at = tokens.closing_angle(following)
            if at < 0:
                return -1
        elif tokens.text(following) == "::":
            last = at = tokens.after(following)
            if tokens.text(at) == "template":
                last = at = tokens.after(at)
        else:
            return at if dependent or tokens.text(last) in names else -1


def _unqualified(tokens: Tokens) -> Iterator[Finding]:
    """Finds pointers and references without an address space."""
    names = _types(tokens)
    for at in range(len(tokens)):
        if tokens.text(tokens.before(at)) in _BEFORE_VALUE:
            continue
        end = _type_end(tokens, at, names)
        if end < 0:
            continue
        qualified = _space_before(tokens, at)
        at, space = _skip_qualifiers(tokens, tokens.after(end))
        inner = tokens.after(at)
        if is_declarator(tokens, at):
            at = inner
        # A reference to a pointer may omit its own address space, which is thread.
        if tokens.text(at) in ("*", "&") and not (qualified or space):
            what = "pointer" if tokens.text(at) == "*" else "reference"
            yield (
                at,
                f"{what} without an address space: {_MISSING}",
            )


def array_parameters(tokens: Tokens) -> Iterator[int]:
    """Yields the types of array parameters such as `float a[4]`.

    They are pointers to thread memory, though other pointers need an address space.
    """
    names = _types(tokens)
    for at in range(len(tokens)):
        end = _type_end(tokens, at, names)
        if end < 0 or not _begins_parameter(tokens, at):
            continue
        name = tokens.after(end)
        following = tokens.after(name)
        is_attribute = tokens.text(tokens.after(following)) == "["
        if not tokens.named(name) or tokens.text(following) != "[" or is_attribute:
            continue
        while tokens.text(following) == "[":
            following = tokens.after(tokens.closing(following))
        if tokens.text(following) in (",", ")"):
            yield at


def _begins_parameter(tokens: Tokens, at: int) -> bool:
    """Returns whether a parameter of the type at `at` has no address space."""
    at = tokens.before(at)
    while tokens.text(at) in _QUALIFIERS - _SPACES:
        at = tokens.before(at)
    return tokens.text(at) in ("(", ",")


def _skip_qualifiers(tokens: Tokens, at: int) -> tuple[int, bool]:
    """Returns the token after the qualifiers, and whether one is an address space."""
    space = False
    while tokens.text(at) in _SPACES | {"const", "volatile"}:
        space |= tokens.text(at) in _SPACES
        at = tokens.after(at)
    return at, space


def _space_before(tokens: Tokens, at: int) -> bool:
    at = tokens.before(at)
    while tokens.text(at) in _QUALIFIERS:
        if tokens.text(at) in _SPACES:
            return True
        at = tokens.before(at)
    return False


def _reserved(tokens: Tokens) -> Iterator[Finding]:
    """Finds keywords of Metal that are used as names, which clang accepts."""
    for at in range(len(tokens)):
        word = tokens.text(at)
        if word not in _RESERVED or not tokens.named(at):
            continue
        before, following = tokens.before(at), tokens.after(at)
        qualifies = tokens.named(following) or tokens.text(following) == "["
        starts = tokens.text(before) in {*STATEMENT_ENDS, ">", "]"}
        in_attribute = tokens.text(before) == "[" and tokens.text(following) in "],"
        if not (in_attribute or (qualifies and (starts or _ends_line(tokens, at)))):
            yield at, f"{word!r} is a keyword of Metal and cannot be a name"


def _unsupported(tokens: Tokens) -> Iterator[Finding]:
    """Finds keywords of C++ that clang accepts and Metal does not support."""
    for at in range(len(tokens)):
        if tokens.text(at) in _UNSUPPORTED and tokens.named(at):
            yield at, _UNSUPPORTED[tokens.text(at)]


def _ends_line(tokens: Tokens, at: int) -> bool:
    """Returns whether a line begins at `at`, as after a preprocessor directive."""
    return at == 0 or "\n" in tokens.text(at - 1)


def _threadgroup_variables(tokens: Tokens) -> Iterator[Finding]:
    inside_kernel = [False] * len(tokens)
    for start, brace, end in rewrite.definitions(tokens):
        head = [tokens.text(at) for at in range(start, brace)]
        if "kernel" in head:
            inside_kernel[brace:end] = [True] * (end - brace)
    for at in range(len(tokens)):
        if tokens.text(at) != "threadgroup" or not tokens.named(at):
            continue
        if tokens.before_statement(at) not in STATEMENT_ENDS:
            continue
        if tokens.directive(at) >= 0:  # a macro may be used inside a kernel
            continue
        declared = _declared(tokens, at)
        if declared is None:
            continue
        name, following = declared
        if tokens.text(following) in ("=", "{"):
            yield at, f"threadgroup variable {name!r} cannot have an initialiser"
        elif not inside_kernel[at]:
            yield (
                at,
                f"threadgroup variable {name!r} outside of a kernel's body: declare it "
                "there and pass a pointer",
            )


def _declared(tokens: Tokens, at: int) -> tuple[str, int] | None:
    """Returns the name of a declared variable and the token after its dimensions.

    Returns None for pointers, references and parameters.
    """
    name = -1
    while tokens.text(at) not in ("[", ",", ";", "=", "{", ""):
        if tokens.text(at) in ("*", "&", "(", ")"):
            return None
        if tokens.text(at) == "<":
            at = max(at, tokens.closing_angle(at))
        name = at
        at = tokens.after(at)
    follower = at
    while tokens.text(follower) == "[":
        follower = tokens.after(tokens.closing(follower))
    return tokens.text(name), follower
