"""Does Metal accept this text? The same text through clang with real address spaces.

The emulator proper compiles every address space to ordinary memory. This is the other
half: clang's C++ for OpenCL knows `device`, `threadgroup`, `constant` and `thread` as
types, and declarations of the Metal library under `include/static` know which of them,
and which overloads, Metal has. Nothing is run.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_marlin.emulator.compiling import build, compiler
from mlx_marlin.emulator.dispatch import Dispatch, record
from mlx_marlin.emulator.errors import CompileError, EmulatorError
from mlx_marlin.emulator.language.lines import FILE, Place, SourceMap
from mlx_marlin.emulator.language.tokens import Tokens
from mlx_marlin.emulator.static.messages import Operands, complaints, multiplications
from mlx_marlin.emulator.static.rules import findings
from mlx_marlin.emulator.static.text import translated

# Kept at import: a test may put the emulator in its place.
_stock = mx.fast.metal_kernel

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
    # No double, no variables at program scope but constant ones; half in arithmetic.
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
)
_MOST_COMPLAINTS = 12

_KERNEL = "checked_kernel"
_ASKED = re.compile(r"\ntemplate \[\[host_name\(.*?\)\]\] \[\[kernel\]\] ")
_HOST_NAME = re.compile(
    r"^template\s*\[\[\s*host_name\([^)]*\)\s*\]\]\s*(?:\[\[\s*kernel\s*\]\]|kernel\b)?",
    re.MULTILINE,
)


@dataclass
class _Unit:
    """A text for clang, and what to call its lines.

    Attributes:
        text: Metal text with a `#line` before every piece.
        sources: Names the lines of the pieces, by the file name in `#line`.
    """

    text: str = ""
    sources: dict[str, SourceMap] = field(default_factory=dict)

    def add(self, file: str, first_line: int, text: str) -> None:
        self.text += f'\n#line {first_line} "{file}"\n{text}'

    def quote(self, place: Place) -> str:
        """The place by its name in the author's strings."""
        if source := self.sources.get(place.file):
            return source.quote(Place(FILE, place.line))
        return self.sources[FILE].quote(place)

    def place(self, physical_line: int) -> Place:
        """What the `#line` directives make of a line, counted from 0."""
        file, number = FILE, 0
        for line in self.text.split("\n")[: physical_line + 1]:
            number += 1
            if found := re.match(r'\s*#\s*line\s+(\d+)(?:\s+"([^"]*)")?', line):
                file, number = found[2] or file, int(found[1]) - 1
        return Place(file, number)


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
) -> frozenset[Operands]:
    """Checks a custom kernel as MLX would send it to Metal.

    Args:
        name: As `mx.fast.metal_kernel` takes it, like everything up to `calls`.
        input_names: Names of the inputs.
        output_names: Names of the outputs.
        source: The body.
        header: What comes before the kernel.
        ensure_row_contiguous: Whether strided inputs are copied first.
        atomic_outputs: Whether outputs are atomic.
        compile_options: Without effect on the check.
        calls: Keyword arguments of the kernel's calls. Inputs need the right shape and
            dtype only. Every template instance that they ask for is checked, all in one
            run of clang: a hundred cost little more than one.

    Returns:
        The operand types of every `simdgroup_multiply_accumulate`, as d, a, b, c.

    Raises:
        CompileError: If the text breaks a rule of Metal. The message names every line.
        EmulatorError: If no compiler is there.
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
    )


def check_text(
    text: str, *, name: str = "text", instances: Sequence[str] = ()
) -> frozenset[Operands]:
    """Checks Metal text that is no custom kernel of MLX, a `.metal` file for instance.

    Args:
        text: Metal source.
        name: What to call it in messages, the file's name for instance.
        instances: Templates to fill in, such as "gemm<half, 4>". A template that nobody
            asks for is hardly checked.

    Returns:
        The operand types of every `simdgroup_multiply_accumulate`, as d, a, b, c.

    Raises:
        CompileError: If the text breaks a rule of Metal. The message names every line.
        EmulatorError: If no compiler is there.
    """
    named = f'#line 1 "{name}"\n{text}'
    unit = _Unit(sources={FILE: SourceMap(named, "", 0)})
    unit.add(name, 1, _HOST_NAME.sub(_plain_instance, text))
    for instance in instances:
        unit.add("instances", 1, f"template decltype({instance}) {instance};")
    return _report(name, unit)


def _recorded(kernel: Any, call: Mapping[str, Any]) -> Dispatch:
    inputs = [
        mx.array(value) if isinstance(value, bool | int | float) else value
        for value in call["inputs"]
    ]
    rest = {key: value for key, value in call.items() if key != "inputs"}
    return record(lambda *blanks: kernel(inputs=list(blanks), **rest), inputs)


@dataclass(frozen=True)
class _Piece:
    """What one call adds to its header, under a name that does not tell instances.

    Attributes:
        function: Template line, signature and body.
        instance: Asks for one set of template arguments; empty without a template.
    """

    function: str
    instance: str

    @classmethod
    def of(cls, header: str, dispatch: Dispatch) -> _Piece:
        written = dispatch.text[len(header) :].replace(dispatch.kernel, _KERNEL)
        function, *asked = _ASKED.split(written)
        return cls(function, "".join(f"template {instance}" for instance in asked))


def _assembled(header: str, dispatches: Sequence[Dispatch]) -> _Unit:
    """One text of a header, every signature once, and every instance."""
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


def _report(name: str, unit: _Unit) -> frozenset[Operands]:
    """Raises what is wrong with a text, or tells its multiplications.

    Args:
        name: Of the text, for the message.
        unit: The text.
    """
    tokens = Tokens(unit.text)
    found = [
        f"{message}\n    at {unit.quote(unit.place(line))}"
        for line, message in findings(tokens)
    ]
    answer = _clang(translated(tokens))
    for complaint in complaints(answer):
        if complaint.counts:
            place = unit.quote(complaint.place)
            found.append(f"{complaint.sentence}\n    at {place}{complaint.instance}")
    if found:
        shown = list(dict.fromkeys(found))[:_MOST_COMPLAINTS]
        raise CompileError(f"{name} breaks Metal's rules:\n  " + "\n  ".join(shown))
    return multiplications(answer)


def _clang(text: str) -> str:
    """What clang says about a text."""
    found = compiler.find()
    if found is None:
        raise EmulatorError(f"no Metal kernel can be checked: {compiler.unavailable()}")
    answer = subprocess.run(
        (*found.clang, *_FLAGS, "-"),
        input=text,
        capture_output=True,
        encoding="utf-8",
    )
    if answer.returncode and all(
        complaint.kind == "warning" for complaint in complaints(answer.stderr)
    ):
        raise EmulatorError(f"{found.clang[0]} cannot check Metal: {answer.stderr}")
    return answer.stderr
