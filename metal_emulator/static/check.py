"""The static check: compiles Metal source with real address spaces.

The emulator compiles every address space to ordinary memory. The static check compiles
the source as C++ for OpenCL instead, in which `device`, `threadgroup`, `constant` and
`thread` are part of types. The headers in `include/static` declare the overloads of the
Metal library. Nothing is run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from metal_emulator.compiling import build, compiler, limited
from metal_emulator.dispatch import Dispatch, record
from metal_emulator.errors import CompileError, EmulatorError, told_to_caller
from metal_emulator.language.lines import FILE, Location, SourceMap
from metal_emulator.language.tokens import Tokens
from metal_emulator.static.messages import Operands, diagnostics, multiplications
from metal_emulator.static.rules import findings
from metal_emulator.static.text import translated
from metal_emulator.static.versions import too_new

# Read at import, because `emulated` replaces it; pytest's plugin wraps it before.
_stock = inspect.unwrap(mx.fast.metal_kernel)

_STATIC = build.INCLUDE / "static"
_FLAGS = (
    "-x",
    "cl",
    "-cl-std=clc++2021",
    "-cl-no-stdinc",
    "-nostdinc",
    "-fsyntax-only",
    "-ferror-limit=0",
    "-fno-caret-diagnostics",
    "-fno-color-diagnostics",
    # No double, no variables at program scope except constants; half arithmetic.
    "-Xclang",
    "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64,-__opencl_c_program_scope_global_variables,"
    "-__opencl_c_device_enqueue,+cl_khr_fp16",
    "-Xclang",
    "-cl-single-precision-constant",
    "-Wno-everything",
    "-Wimplicit-float-conversion",
    "-Wdeprecated-declarations",
    "-Wuninitialized",
    "-I",
    str(_STATIC),
    "-I",
    str(_STATIC / "metal"),
    "-I",
    str(_STATIC / build.TENSOR),
)
_MAX_DIAGNOSTICS = 12

_KERNEL = "checked_kernel"
_INSTANTIATION = re.compile(r"\ntemplate \[\[host_name\(.*?\)\]\] \[\[kernel\]\] ")
_HOST_NAME = re.compile(
    r"^template\s*\[\[\s*host_name\([^)]*\)\s*\]\]\s*(?:\[\[\s*kernel\s*\]\]|kernel\b)?",
    re.MULTILINE,
)


@dataclass
class _Unit:
    """A translation unit and the names of its lines."""

    text: str = ""  # Metal source with a `#line` directive before every part
    # The source map of each part, by the file name in `#line`
    sources: dict[str, SourceMap] = field(default_factory=dict)

    def add(self, file: str, first_line: int, text: str) -> None:
        self.text += f'\n#line {first_line} "{file}"\n{text}'

    def quote(self, location: Location) -> str:
        """Returns a line by its name in the author's strings, with its text."""
        if source := self.sources.get(location.file):
            return source.quote(Location(FILE, location.line))
        return self.sources[FILE].quote(location)

    def location(self, physical_line: int) -> Location:
        """Returns the location of a line, counted from 0, after `#line` directives."""
        file, number = FILE, 0
        for line in self.text.split("\n")[: physical_line + 1]:
            number += 1
            if found := re.match(r'\s*#\s*line\s+(\d+)(?:\s+"([^"]*)")?', line):
                file, number = found[2] or file, int(found[1]) - 1
        return Location(file, number)


@told_to_caller
def check(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, Any] | None = None,
    *,
    calls: Sequence[Mapping[str, Any]],
    macos: str | None = None,
) -> frozenset[Operands]:
    """Checks the source of a custom kernel as MLX generates it.

    The arguments before `calls` are those of `mx.fast.metal_kernel`.

    Args:
        name: Name of the kernel.
        input_names: Names of the inputs.
        output_names: Names of the outputs.
        source: The body.
        header: The text before the kernel.
        ensure_row_contiguous: Whether strided inputs are copied first.
        atomic_outputs: Whether outputs are atomic.
        compile_options: Ignored.
        calls: Keyword arguments of calls of the kernel. Only the shapes and dtypes of
            inputs matter. All template instances of these calls are checked in one run
            of clang, so that 100 instances cost little more than one.
        macos: The oldest system on which the kernel is meant to run, such as "26.2";
            None for any.

    Returns:
        The operand types of every `simdgroup_multiply_accumulate`, as d, a, b, c.

    Raises:
        ValueError: If `macos` is no version.
        CompileError: If the source violates a rule of Metal. The message names every
            line.
        EmulatorError: If no compiler is available.
    """
    kernel: Any = _stock(
        name,
        input_names,
        output_names,
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
        compile_options,
    )
    return _report(
        f"kernel {name}",
        _assembled(header, [_recorded(kernel, call) for call in calls]),
        macos,
    )


@told_to_caller
def check_text(
    text: str,
    *,
    name: str = "text",
    instances: Sequence[str] = (),
    macos: str | None = None,
) -> frozenset[Operands]:
    """Checks Metal source with whole kernels, such as a `.metal` file.

    Args:
        text: Metal source.
        name: Name of the source in messages, such as the file name.
        instances: Templates to instantiate, such as "gemm<half, 4>". Templates without
            an instance are checked only superficially.
        macos: As for `check`.

    Returns:
        The operand types of every `simdgroup_multiply_accumulate`, as d, a, b, c.

    Raises:
        ValueError: If `macos` is no version.
        CompileError: If the source violates a rule of Metal. The message names every
            line.
        EmulatorError: If no compiler is available.
    """
    named = f'#line 1 "{name}"\n{text}'
    unit = _Unit(sources={FILE: SourceMap(named, "", 0)})
    unit.add(name, 1, _HOST_NAME.sub(_plain_instance, text))
    for instance in instances:
        unit.add("instances", 1, f"template decltype({instance}) {instance};")
    return _report(name, unit, macos)


def _recorded(kernel: Any, call: Mapping[str, Any]) -> Dispatch:
    inputs = [
        mx.array(value) if isinstance(value, bool | int | float) else value
        for value in call["inputs"]
    ]
    rest = {key: value for key, value in call.items() if key != "inputs"}
    return record(lambda *blanks: kernel(inputs=list(blanks), **rest), inputs)


@dataclass(frozen=True)
class _Piece:
    """The text that MLX adds to the header for one call, with a generic kernel name."""

    function: str  # Template line, signature and body
    instance: str  # Explicit instantiation; empty if the kernel is not a template

    @classmethod
    def of(cls, header: str, dispatch: Dispatch) -> _Piece:
        written = dispatch.text[len(header) :].replace(dispatch.kernel, _KERNEL)
        function, *instances = _INSTANTIATION.split(written)
        return cls(function, "".join(f"template {instance}" for instance in instances))


def _assembled(header: str, dispatches: Sequence[Dispatch]) -> _Unit:
    """Returns one unit with the header, every signature once, and every instance."""
    unit = _Unit()
    unit.add(FILE, 1, header)
    names: dict[str, str] = {}
    instances: dict[str, None] = {}
    for dispatch in dispatches:
        piece = _Piece.of(header, dispatch)
        if piece.function not in names:
            names[piece.function] = name = f"{_KERNEL}_{len(names)}"
            unit.sources[name] = _source_map(header, dispatch)
            unit.sources.setdefault(FILE, unit.sources[name])
            function = piece.function.replace(_KERNEL, name)
            unit.add(name, header.count("\n") + 1, function)
        instances[piece.instance.replace(_KERNEL, names[piece.function])] = None
    unit.add("instances", 1, "\n".join(instances))
    return unit


def _source_map(header: str, dispatch: Dispatch) -> SourceMap:
    signature = dispatch.text.rindex(f"[[kernel]] void {dispatch.kernel}(")
    body = dispatch.text.index(") {\n", signature)
    return SourceMap(dispatch.text, header, dispatch.text.count("\n", 0, body) + 2)


def _plain_instance(found: re.Match[str]) -> str:
    return "template" + "\n" * found[0].count("\n")


def _report(name: str, unit: _Unit, macos: str | None) -> frozenset[Operands]:
    """Checks a unit and returns the operand types of its multiplications."""
    tokens = Tokens(unit.text)
    broken = [*findings(tokens), *(() if macos is None else too_new(tokens, macos))]
    found = [
        f"{message}\n    at {unit.quote(unit.location(line))}"
        for line, message in broken
    ]
    answer = _clang(translated(tokens))
    for diagnostic in diagnostics(answer):
        if diagnostic.is_metal_error:
            line = unit.quote(diagnostic.location)
            found.append(f"{diagnostic.message}\n    at {line}{diagnostic.instance}")
    if found:
        shown = list(dict.fromkeys(found))[:_MAX_DIAGNOSTICS]
        raise CompileError(f"{name} breaks Metal's rules:\n  " + "\n  ".join(shown))
    return multiplications(answer)


def _clang(text: str) -> str:
    """Returns clang's diagnostics of a text."""
    found = compiler.find()
    if found is None:
        raise EmulatorError(f"no Metal kernel can be checked: {compiler.unavailable()}")
    try:
        return limited.run((*found.clang, *_FLAGS, "-"), text=text)
    except limited.ExceededError as exceeded:
        raise CompileError(f"the text cannot be checked: {exceeded}") from None
    except limited.RefusedError as refused:
        answer = str(refused)
    if all(diagnostic.kind == "warning" for diagnostic in diagnostics(answer)):
        raise EmulatorError(f"{found.clang[0]} cannot check Metal: {answer}")
    return answer
