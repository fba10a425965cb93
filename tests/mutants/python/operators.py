"""Mutants of a Python file: mutmut's, and of kinds that mutmut has no operators for."""

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

POWERS_OF_TEN = {1e3, 1e6, 1e9, 1e-3, 1e-6, 1e-9}
OTHER_CALL = {"min": "max", "max": "min", "any": "all", "all": "any"}
COMMUTE = {"min", "max", "gcd", "lcm", "eval", "async_eval", "evaluate", "suppress"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """A change of a file's bytes from `start` to `end`."""

    file: str  # relative to the checkout
    function: str  # qualified name of the outermost function; "" for a module or class
    line: int
    kind: str
    start: int
    end: int
    old: str
    new: str

    @property
    def place(self) -> str:
        """The name of its function, or of its file, in the map of calls."""
        return f"{self.file}:{self.function}" if self.function else self.file

    def apply(self, source: bytes) -> bytes:
        """Returns the file's bytes with the change."""
        return source[: self.start] + self.new.encode() + source[self.end :]


class _Own(ast.NodeVisitor):
    """Collects mutants that drop, swap or negate; simple ones where mutmut has none."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.found: list[Mutant] = []
        self.scope: list[ast.AST] = []
        lines = source.splitlines(keepends=True)
        self.offsets = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]

    def span(self, first: ast.AST, last: ast.AST) -> tuple[int, int]:
        start = self.offsets[first.lineno - 1] + first.col_offset  # type: ignore[attr-defined]
        return start, self.offsets[last.end_lineno - 1] + last.end_col_offset  # type: ignore[attr-defined]

    def add(self, kind: str, node: ast.AST, new: ast.AST | str) -> None:
        text = new if isinstance(new, str) else ast.unparse(new)
        if isinstance(node, ast.expr):
            text = f"({text})"
        self.put(kind, node, node, text)

    def put(self, kind: str, first: ast.AST, last: ast.AST, text: str) -> None:
        start, end = self.span(first, last)
        mutant = Mutant(
            self.file,
            qualified_name(self.scope),
            first.lineno,  # type: ignore[attr-defined]
            kind,
            start,
            end,
            self.source[start:end].decode(),
            text,
        )
        try:
            compile(mutant.apply(self.source), self.file, "exec")
        except (SyntaxError, ValueError):
            return
        self.found.append(mutant)

    def visit(self, node: ast.AST) -> None:
        getattr(self, f"visit_{type(node).__name__}", lambda node: None)(node)
        if isinstance(node, Function | ast.ClassDef):
            self.scope.append(node)
            for child in (*_defaults(node), *node.body):
                self.visit(child)
            self.swap_lines(node.body)
            self.scope.pop()
        elif isinstance(node, ast.AnnAssign):
            if node.value:
                self.visit(node.value)
        elif not isinstance(node, ast.JoinedStr):
            self.generic_visit(node)
        if isinstance(node, ast.For | ast.If | ast.While | ast.With | ast.Try):
            self.swap_lines(node.body)

    def swap_lines(self, body: Sequence[ast.stmt]) -> None:
        """Swaps neighbours that act: of two new names the order seldom counts."""
        for one, two in pairwise(body):
            calls = isinstance(one, ast.Expr) or isinstance(two, ast.Expr)
            if _acts(one) and _acts(two) and calls and self.scope:
                texts = [
                    self.source[slice(*self.span(x, x))].decode() for x in (two, one)
                ]
                between = self.source[self.span(one, one)[1] : self.span(two, two)[0]]
                self.put("lines swapped", one, two, between.decode().join(texts))

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom):
            self.add("statement dropped", node, "pass")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add("statement dropped", node, "pass")

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(
            isinstance(each, ast.Attribute | ast.Subscript) for each in node.targets
        ):
            self.add("statement dropped", node, "pass")

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add("raise dropped", node, "pass")

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self.add("condition negated", node.test, ast.UnaryOp(ast.Not(), node.test))

    def visit_While(self, node: ast.While) -> None:
        self.visit_If(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit_If(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.add("filter dropped", test, "True")

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for i in range(len(node.values)):
            rest = node.values[:i] + node.values[i + 1 :]
            self.add("operand dropped", node, ast.BoolOp(node.op, rest))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = any(isinstance(x, ast.JoinedStr) for x in (node.left, node.right))
        if isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv) and not text:
            self.add("factor left out", node, node.left)
            if isinstance(node.op, ast.Mult):
                self.add("factor left out", node, node.right)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            if self.unseen():
                self.add("constant", node, repr(not value))
        elif isinstance(value, int | float):
            if value in POWERS_OF_TEN:
                self.add("power of ten", node, repr(value * 1000))
            elif self.unseen():
                self.add("constant", node, repr(value + 1))

    def visit_Compare(self, node: ast.Compare) -> None:
        names = re.search("version|release", ast.unparse(node))
        if names and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            sides = [f"str({ast.unparse(x)})" for x in (node.left, node.comparators[0])]
            sign = ast.unparse(node).removeprefix(ast.unparse(node.left)).split()[0]
            self.add("compared as text", node, f" {sign} ".join(sides))
        closed = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
        closed |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn}
        other = closed.get(type(node.ops[0]))
        if self.unseen() and other:
            changed = copy.copy(node)
            changed.ops = [other(), *node.ops[1:]]
            self.add("comparison", node, changed)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in OTHER_CALL:
            self.add("other extreme", node.func, OTHER_CALL[name])
        pairs = pairwise(
            () if ast.unparse(node.func).split(".")[-1] in COMMUTE else node.args
        )
        for i, (one, two) in enumerate(pairs):
            plain = ast.Starred, ast.Constant
            if not isinstance(one, plain) and not isinstance(two, plain):
                changed = copy.copy(node)
                changed.args = [*node.args[:i], two, one, *node.args[i + 2 :]]
                self.add("arguments swapped", node, changed)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value and self.unseen() and ast.unparse(node.value) != "None":
            self.add("nothing returned", node, "return None")

    def unseen(self) -> bool:
        """Whether mutmut leaves this place out: no function, or a decorated one."""
        outer = next((x for x in self.scope if isinstance(x, Function)), None)
        return outer is None or bool(outer.decorator_list)


def _acts(node: ast.stmt) -> bool:
    """Whether a statement is a call, or changes something that has a name already."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
    return False


def _defaults(node: Function | ast.ClassDef) -> list[ast.expr]:
    if isinstance(node, ast.ClassDef):
        return []
    return [x for x in (*node.args.defaults, *node.args.kw_defaults) if x]


def qualified_name(scope: Sequence[ast.AST]) -> str:
    """Returns the outermost function's name, with its classes; "" outside of one."""
    names: list[str] = []
    for node in scope:
        names.append(node.name)  # type: ignore[attr-defined]
        if isinstance(node, Function):
            return ".".join(names)
    return ""


def own(root: Path, file: str) -> list[Mutant]:
    """Returns the mutants of our own kinds."""
    source = (root / file).read_bytes()
    visitor = _Own(file, source)
    visitor.visit(ast.parse(source))
    return [x for x in visitor.found if not _is_message(x, source)]


def mutmuts(root: Path, file: str) -> Iterator[tuple[str, int]]:
    """Yields the file and a number for each mutant that mutmut makes of it."""
    yield from ((file, i) for i in range(len(_mutmuts(root, file)[1])))


@cache
def _mutmuts(root: Path, file: str) -> tuple[Any, Any]:
    """Returns a file's tree and its mutants, which takes seconds."""
    from mutmut.mutation.file_mutation import create_mutations

    source = (root / file).read_text(encoding="utf-8")
    return create_mutations(file, source)[:2]


def mutmut(root: Path, file: str, number: int) -> Mutant | None:
    """Returns one of mutmut's mutants; None for one that changes a message."""
    source = (root / file).read_bytes()
    module, found = _mutmuts(root, file)
    chosen = found[number]
    text = module.deep_replace(chosen.original_node, chosen.mutated_node).code.encode()  # type: ignore[arg-type]
    start = next(
        i for i, (a, b) in enumerate(zip(source, text, strict=False)) if a != b
    )
    limit = min(len(source), len(text)) - start
    tail = next((i for i in range(limit) if source[-1 - i] != text[-1 - i]), limit)
    end = len(source) - tail
    old, new = source[start:end].decode(), text[start : len(text) - tail].decode()
    line = source[:start].count(b"\n") + 1
    place = _function_at(ast.parse(source), line)
    mutant = Mutant(file, place, line, "mutmut", start, end, old, new)
    return None if _is_message(mutant, source) else mutant


def _function_at(tree: ast.AST, line: int) -> str:
    scope: list[ast.AST] = []
    node: ast.AST | None = tree
    while node is not None and not (scope and isinstance(scope[-1], Function)):
        inner = (
            x for x in getattr(node, "body", ()) if x.lineno <= line <= x.end_lineno
        )
        node = next((x for x in inner if isinstance(x, Function | ast.ClassDef)), None)
        scope += [node] if node is not None else []
    return qualified_name(scope)


def _is_message(mutant: Mutant, source: bytes) -> bool:
    """Whether the change is inside of a raised error, a text of words or a format."""
    visitor = _Own(mutant.file, source)
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Constant) and re.search(r"\s|^$", str(node.value))
        if isinstance(node, ast.Raise | ast.JoinedStr) or (
            text and isinstance(node.value, str)  # type: ignore[attr-defined]
        ):
            start, end = visitor.span(node, node)
            if start <= mutant.start and mutant.end <= end:
                return mutant.kind != "raise dropped"
    return False
