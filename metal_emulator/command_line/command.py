"""`python -m metal_emulator FILE`: runs a Metal kernel and reports its outputs."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

import metal_emulator
from metal_emulator import regular_files
from metal_emulator.command_line import output
from metal_emulator.command_line.arguments import (
    all_named,
    array_type,
    byte_count,
    constants,
    grid,
    input_array,
    mlx_template,
    template,
    triple,
)
from metal_emulator.command_line.options import add_arguments as add_arguments
from metal_emulator.language.includes import flattened

DESCRIPTION = """
Run a Metal kernel on the CPU and report where it breaks Metal's rules. The text is
compiled and runs as native code with your rights: run only text that you trust.
"""
EPILOG = """
FILE holds the body of a kernel, as mx.fast.metal_kernel takes it, or whole kernels.
Without --entry and --grid the entries of a file with several kernels are listed.

ARRAY is SHAPE:DTYPE[:FILL], such as 8x512:float16:random, where FILL is random, arange,
ones or zeros. An input can also be a .npy file, or a number, which the kernel receives
as a reference, or none: a buffer that is not set. The name of an earlier input stands
for the same buffer.

In a file with whole kernels, --input and --output name parameters of the kernel, and
--template its template parameters. An array of uint8 stands for a structure of as many
bytes.

example:
  python -m metal_emulator double.metal --grid 256 --input x=4x64:float16 \\
      --output y=4x64:float16 --threadgroup 64 --template T=float16 --trace
"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the arguments ask for."""

    kernel: Callable[..., list[mx.array]]  # The kernel
    check: Callable[[], object]  # Runs the static check
    call: dict[str, Any]  # Keyword arguments of the kernel
    outputs: tuple[str, ...]  # Names of the outputs, in order


def run(args: argparse.Namespace) -> int:
    """Runs the kernel; returns 1 if the emulator found a fault in it."""
    output.check(args.json_file)
    library = _library(args)
    if len(library.entries) > 1 and not args.entry and not args.grid:
        output.show_entries(library, args.json_file)
        return 0
    if not args.grid:
        raise ValueError(
            "--grid is missing, expected the threads of the grid: X[,Y[,Z]]"
        )
    try:
        request = _whole(args, library) if library.entries else _body(args)
        if args.check:
            request.check()
        results, counters = _launch(args, request)
    except metal_emulator.EmulatorError as fault:
        print(fault)
        return 1
    lines = [
        output.summary(*each) for each in zip(request.outputs, results, strict=True)
    ]
    tables = [f"\n{launch.table()}" for launch in counters]
    output.show(
        [*lines, *tables], [each.as_json() for each in counters], args.json_file
    )
    return 0


def _library(args: argparse.Namespace) -> metal_emulator.Library:
    """Returns the kernels of the file, behind the headers."""
    texts = [
        flattened(
            regular_files.read_text(file), file.name, [file.parent, *args.include]
        )
        for file in [*args.header, args.file]
    ]
    return metal_emulator.Library(args.file.name, "\n".join(texts))


def _call(args: argparse.Namespace, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns what every call takes, with the outputs in the order of the options."""
    outputs = all_named(args.output, "--output")
    types = [array_type(text, "--output") for text in outputs.values()]
    return {
        "inputs": inputs,
        "output_shapes": [shape for shape, _, _ in types],
        "output_dtypes": [dtype for _, dtype, _ in types],
        "grid": grid(args.grid),
        "threadgroup": triple(args.threadgroup, "--threadgroup"),
    }


def _inputs(args: argparse.Namespace) -> dict[str, Any]:
    texts = all_named(args.input, "--input")
    found: dict[str, Any] = {}
    for name, text in texts.items():
        found[name] = found[text] if text in found else input_array(text)
    return found


def _whole(args: argparse.Namespace, library: metal_emulator.Library) -> Request:
    """Returns the request for a kernel with a signature."""
    values = constants(args.constant)
    call = _call(args, _inputs(args))
    names = list(all_named(args.output, "--output"))
    kernel = library.function(args.entry, values, names)
    order = [names.index(name) for name in kernel.outputs]
    for key in ("output_shapes", "output_dtypes"):
        call[key] = [call[key][at] for at in order]
    memory = all_named(args.threadgroup_memory, "--threadgroup-memory")
    call["threadgroup_memory"] = {
        name: byte_count(size) for name, size in memory.items()
    }
    call["template"] = [template(text) for text in args.template]
    return Request(
        kernel=kernel,
        check=lambda: kernel.check(call["template"]),
        call=call,
        outputs=kernel.outputs,
    )


def _body(args: argparse.Namespace) -> Request:
    """Returns the request for the body of a kernel."""
    for option in ("entry", "constant", "threadgroup_memory"):
        if given := getattr(args, option):
            raise ValueError(
                f"--{option.replace('_', '-')} {given}, expected a kernel with a "
                f"signature, {args.file} is a body"
            )
    inputs = _inputs(args)
    for name in (name for name, value in inputs.items() if value is None):
        raise ValueError(
            f"--input {name}=none, expected a value: {args.file} is a body"
        )
    call = _call(args, inputs)
    names = tuple(all_named(args.output, "--output"))
    definition: dict[str, Any] = {
        "name": args.file.stem,
        "input_names": list(inputs),
        "output_names": list(names),
        "header": "\n".join(map(regular_files.read_text, args.header)),
        "source": regular_files.read_text(args.file),
        "atomic_outputs": args.atomic_outputs,
    }
    call["inputs"] = list(inputs.values())
    call["template"] = [mlx_template(text) for text in args.template]
    return Request(
        kernel=metal_emulator.metal_kernel(**definition),
        check=lambda: metal_emulator.check(**definition, calls=[call]),
        call=call,
        outputs=names,
    )


def _launch(
    args: argparse.Namespace, request: Request
) -> tuple[list[mx.array], list[metal_emulator.Counters]]:
    """Runs the kernel and returns its outputs and, in trace mode, the counters."""
    results: list[mx.array] = []
    counters: list[metal_emulator.Counters] = []
    with (
        interruptible(),
        metal_emulator.emulated(seed=args.seed),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", metal_emulator.EmulatorWarning)

        def call() -> None:
            results.extend(request.kernel(**request.call, init_value=args.init_value))

        if args.trace or args.json_file:
            counters = metal_emulator.trace(call)
        else:
            call()
    for warning in caught:
        print(warning.message, file=sys.stderr)
    return results, counters


@contextmanager
def interruptible() -> Iterator[None]:
    """Makes Ctrl-C end the process immediately inside the block.

    Python's own handler would not run before the kernel, which is native code, returns.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
