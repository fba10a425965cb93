"""`mlx-marlin emulate FILE`: runs a Metal kernel on the CPU and reports its outputs."""

import argparse
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_marlin import regular_files
from mlx_marlin.cli import json_output
from mlx_marlin.cli.emulate.arguments import (
    all_named,
    array_type,
    byte_count,
    grid,
    input_array,
    template,
    triple,
)

if TYPE_CHECKING:
    from metal_emulator import Counters
    from metal_emulator.language.whole_kernel import WholeKernel

DESCRIPTION = """
Run a Metal kernel on the CPU, as mx.fast.metal_kernel runs it on a GPU.
"""
EPILOG = """
ARRAY is SHAPE:DTYPE[:FILL], such as 8x512:float16:random, where FILL is random, arange,
ones or zeros. An input can also be a .npy file, or a number, which the kernel receives
as a reference.

In a file with whole kernels, --input and --output name parameters of the kernel, and
--template its template parameters. An array of uint8 stands for a structure of as many
bytes.

example:
  mlx-marlin emulate double.metal --input x=4x64:float16 --output y=4x64:float16 \\
      --grid 256 --threadgroup 64 --template T=float16 --trace
"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The kernel and the call that the arguments describe.

    Attributes:
        definition: Keyword arguments of `metal_kernel`.
        call: Keyword arguments of the kernel.
        whole: The kernel, if the file defines whole kernels.
    """

    definition: dict[str, Any]
    call: dict[str, Any]
    whole: "WholeKernel | None"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="the body of a kernel, or whole kernels: `kernel void f(...)`",
    )
    _add_kernel_arguments(parser)
    _add_launch_arguments(parser)
    report = parser.add_argument_group("checks and output")
    report.add_argument(
        "--trace",
        action="store_true",
        help="check every memory access, and print counters",
    )
    report.add_argument(
        "--check", action="store_true", help="check address spaces and types first"
    )
    json_output.add_option(report)


def _add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    kernel = parser.add_argument_group("kernel")
    several: dict[str, Any] = {"action": "append", "default": []}
    kernel.add_argument(
        "--kernel", metavar="NAME", help="the kernel to run, if FILE has several"
    )
    kernel.add_argument(
        "--header", type=Path, metavar="FILE", help="text before the kernel", **several
    )
    kernel.add_argument("--input", metavar="NAME=ARRAY", help="an input", **several)
    kernel.add_argument("--output", metavar="NAME=ARRAY", help="an output", **several)
    kernel.add_argument(
        "--template",
        metavar="NAME=VALUE",
        help="a template argument: an integer, true, false or a dtype",
        **several,
    )
    kernel.add_argument(
        "--threadgroup-memory",
        metavar="NAME=BYTES",
        help="size of a parameter [[threadgroup(n)]] of a whole kernel",
        **several,
    )
    kernel.add_argument(
        "--init-value", type=float, metavar="VALUE", help="initial value of outputs"
    )
    kernel.add_argument(
        "--atomic-outputs", action="store_true", help="declare the outputs atomic"
    )


def _add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    launch = parser.add_argument_group("launch")
    launch.add_argument(
        "--grid", required=True, metavar="X[,Y[,Z]]", help="threads of the grid"
    )
    launch.add_argument(
        "--threadgroup",
        default="32",
        metavar="X[,Y[,Z]]",
        help="threads of a threadgroup; default: 32",
    )
    launch.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the order of threadgroups; default: 0",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the kernel; returns 1 if the emulator found a fault in it."""
    import metal_emulator

    request = _request(args)
    try:
        if args.check:
            _check(request)
        results, counters = _launch(args, request)
    except metal_emulator.EmulatorError as fault:
        print(fault)
        return 1
    json_output.write(args, [launch.as_json() for launch in counters])
    names = request.definition["output_names"]
    for name, array in zip(names, results, strict=True):
        print(summary(name, array))
    for launch in counters:
        print(f"\n{launch.table()}")
    return 0


def _request(args: argparse.Namespace) -> Request:
    """Reads the files and parses the arguments."""
    from metal_emulator.language.whole_kernel import chosen, whole_kernels

    inputs = all_named(args.input, "--input")
    outputs = all_named(args.output, "--output")
    definition: dict[str, Any] = {
        "name": args.file.stem,
        "input_names": list(inputs),
        "output_names": list(outputs),
        "header": "\n".join(map(regular_files.read_text, args.header)),
        "source": regular_files.read_text(args.file),
        "atomic_outputs": args.atomic_outputs,
    }
    types = [array_type(text, "--output") for text in outputs.values()]
    arrays = {name: input_array(text) for name, text in inputs.items()}
    whole = chosen(whole_kernels(definition["source"]), args.kernel)
    if whole:
        memory = all_named(args.threadgroup_memory, "--threadgroup-memory")
        sizes = {name: byte_count(size) for name, size in memory.items()}
        definition |= _calling_definition(
            args.file, definition, whole, whole.call(arrays, outputs, sizes)
        )
    call = {
        "inputs": list(arrays.values()),
        "output_shapes": [shape for shape, _, _ in types],
        "output_dtypes": [dtype for _, dtype, _ in types],
        "grid": grid(args.grid),
        "threadgroup": triple(args.threadgroup, "--threadgroup"),
        "template": [template(text) for text in args.template],
    }
    return Request(definition=definition, call=call, whole=whole)


def _calling_definition(
    file: Path, definition: dict[str, Any], whole: "WholeKernel", call: str
) -> dict[str, str]:
    """Returns the name, header and source of a kernel that calls a whole kernel."""
    header, source = definition["header"], definition["source"]
    return {
        "name": whole.name,
        "header": f'{header}\n#line 1 "{file.name}"\n{source}\n',
        "source": f'#line 1 "the call of {whole.name}"\n{call}',
    }


def _check(request: Request) -> None:
    """Runs the static check."""
    import metal_emulator

    if request.whole:
        values = (value for _, value in request.call["template"])
        instance = request.whole.instance(values)
        metal_emulator.check_text(request.definition["header"], instances=instance)
    else:
        metal_emulator.check(**request.definition, calls=[request.call])


def _launch(
    args: argparse.Namespace, request: Request
) -> "tuple[list[mx.array], list[Counters]]":
    """Runs the kernel and returns its outputs and, in trace mode, the counters."""
    import metal_emulator

    kernel: Callable[..., list[mx.array]]
    kernel = metal_emulator.metal_kernel(**request.definition)
    results: list[mx.array] = []
    counters: list[Counters] = []
    with (
        interruptible(),
        metal_emulator.emulated(seed=args.seed),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", metal_emulator.EmulatorWarning)

        def call() -> None:
            results.extend(kernel(**request.call, init_value=args.init_value))

        if args.trace or args.json:
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


def summary(name: str, array: mx.array) -> str:
    """Returns a line that describes an output; unwritten elements are NaN."""
    dtype = str(array.dtype).removeprefix("mlx.core.")
    head = f"{name}: {dtype} {'x'.join(map(str, array.shape)) or 'scalar'}"
    if array.size == 0:
        return f"{head}, empty"
    values = array.astype(mx.float32)
    finite = mx.where(mx.isfinite(values), values, 0)
    not_finite = (~mx.isfinite(values)).sum().item()
    return (
        f"{head}, min {finite.min().item():.6g}, max {finite.max().item():.6g}, "
        f"mean {finite.mean().item():.6g}, {not_finite} NaN or infinite"
    )
