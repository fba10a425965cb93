"""`mlx-marlin emulate FILE`: runs one Metal kernel on the CPU and says what it did."""

import argparse
import json
import math
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

FILLS: dict[str, Callable[[list[int]], mx.array]] = {
    "random": lambda shape: mx.random.normal(shape, key=mx.random.key(0)),
    "arange": lambda shape: mx.arange(mx.zeros(shape).size).reshape(shape),
    "ones": mx.ones,
    "zeros": mx.zeros,
}
"""What an input may be filled with; random is normal, the same on every run."""

MOST_THREADS = 2**32
"""Threads of a grid: the emulator takes minutes for as many. Metal counts them in 32
bits, too."""
MOST_ELEMENTS = 2**28
"""Elements of an array: 1 GiB of float32."""
EPILOG = """
ARRAY is SHAPE:DTYPE[:FILL], such as 8x512:float16:random (FILL: random, arange, ones or
zeros), or for an input also a .npy file or a number, which arrives as a reference.

example:
  mlx-marlin emulate double.metal --input x=4x64:float16 --output y=4x64:float16 \\
      --grid 256 --threadgroup 64 --template T=float16 --trace

A file that defines kernels whole is taken as it is: --input and --output name the
parameters of the kernel, --template those of its template. An array of uint8 stands for
a structure of so many bytes.
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Adds the command's arguments."""
    parser = subparsers.add_parser(
        "emulate",
        description="Run a Metal kernel as mx.fast.metal_kernel would.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="a kernel's body, or whole kernels: `kernel void f(...)`",
    )
    parser.add_argument("--kernel", metavar="NAME", help="which of several to run")
    parser.add_argument("--header", type=Path, action="append", default=[])
    parser.add_argument("--input", action="append", default=[], metavar="NAME=ARRAY")
    parser.add_argument("--output", action="append", default=[], metavar="NAME=ARRAY")
    parser.add_argument("--template", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--grid", required=True, metavar="X[,Y[,Z]]", help="threads")
    parser.add_argument("--threadgroup", default="32", metavar="X[,Y[,Z]]")
    parser.add_argument(
        "--threadgroup-memory",
        action="append",
        default=[],
        metavar="NAME=BYTES",
        help="size of a parameter [[threadgroup(n)]] of a whole kernel",
    )
    parser.add_argument("--init-value", type=float, help="fill the outputs with it")
    parser.add_argument("--atomic-outputs", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="order of threadgroups")
    parser.add_argument("--trace", action="store_true", help="find races, and count")
    parser.add_argument("--check", action="store_true", help="check address spaces")
    parser.add_argument("--json", action="store_true", help="the counters as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the kernel; returns 1 if the emulator found a fault in it."""
    from mlx_marlin import emulator
    from mlx_marlin.emulator.language.whole_kernel import chosen, whole_kernels

    inputs = all_named(args.input, "--input")
    outputs = all_named(args.output, "--output")
    definition: dict[str, Any] = {
        "name": args.file.stem,
        "input_names": list(inputs),
        "output_names": list(outputs),
        "header": "\n".join(map(metal_text, args.header)),
        "source": metal_text(args.file),
        "atomic_outputs": args.atomic_outputs,
    }
    shapes = [described(text, "--output") for text in outputs.values()]
    arrays = {name: array_of(text) for name, text in inputs.items()}
    kernel = chosen(whole_kernels(definition["source"]), args.kernel)
    if kernel:
        definition["name"] = kernel.name
        definition["header"] += (
            f'\n#line 1 "{args.file.name}"\n{definition["source"]}\n'
        )
        memory = all_named(args.threadgroup_memory, "--threadgroup-memory")
        sizes = {name: byte_count(size) for name, size in memory.items()}
        call = kernel.call(arrays, outputs, sizes)
        definition["source"] = f'#line 1 "the call of {kernel.name}"\n{call}'
    arguments = {
        "inputs": list(arrays.values()),
        "output_shapes": [shape for shape, _, _ in shapes],
        "output_dtypes": [dtype for _, dtype, _ in shapes],
        "grid": grid(args.grid),
        "threadgroup": triple(args.threadgroup, "--threadgroup"),
        "template": [template(each) for each in args.template],
    }
    try:
        if args.check and kernel:
            instance = kernel.instance(value for _, value in arguments["template"])
            emulator.check_text(definition["header"], instances=instance)
        elif args.check:
            emulator.check(**definition, calls=[arguments])
        arguments["init_value"] = args.init_value
        return _run(args, emulator.metal_kernel(**definition), arguments, list(outputs))
    except emulator.EmulatorError as fault:
        print(fault)
        return 1


def _run(
    args: argparse.Namespace,
    kernel: Callable[..., list[mx.array]],
    call: dict[str, Any],
    names: list[str],
) -> int:
    from mlx_marlin import emulator

    results: list[mx.array] = []
    with (
        interruptible(),
        emulator.emulated(seed=args.seed),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always", emulator.EmulatorWarning)
        if args.trace or args.json:
            counted = emulator.trace(lambda: results.extend(kernel(**call)))
        else:
            results.extend(kernel(**call))
            counted = []
    for warning in told:
        print(warning.message, file=sys.stderr)
    if args.json:
        print(json.dumps([each.as_json() for each in counted], indent=2))
        return 0
    for name, array in zip(names, results, strict=True):
        print(summary(name, array))
    for each in counted:
        print(f"\n{each.table()}")
    return 0


@contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the process at once.

    Python's own handler would wait until the kernel, which is native code, has run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def metal_text(path: Path) -> str:
    """Reads a file of Metal; comments may hold any character."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} is not UTF-8, expected Metal source in UTF-8"
        ) from None


def summary(name: str, array: mx.array) -> str:
    """Describes an output in a line; what a kernel never wrote is NaN."""
    head = f"{name}: {dtype_of(array)} {'x'.join(map(str, array.shape)) or 'scalar'}"
    if array.size == 0:
        return f"{head}, empty"
    values = array.astype(mx.float32)
    finite = mx.where(mx.isfinite(values), values, 0)
    odd = (~mx.isfinite(values)).sum().item()
    return (
        f"{head}, min {finite.min().item():.6g}, max {finite.max().item():.6g}, "
        f"mean {finite.mean().item():.6g}, {odd} NaN or infinite"
    )


def named(text: str, option: str) -> tuple[str, str]:
    """Splits NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier() or not value:
        raise ValueError(f"{option} {text!r}, expected NAME=VALUE")
    return name, value


def all_named(texts: list[str], option: str) -> dict[str, str]:
    """Splits each NAME=VALUE; a name may occur once."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, value = named(text, option)
        if name in pairs:
            raise ValueError(f"{option} {text!r}: {name} is given twice, expected once")
        pairs[name] = value
    return pairs


def array_of(text: str) -> Any:
    """Returns the input that a text describes: a file, a number or a filled array."""
    if text.endswith(".npy"):
        return array_of_file(text)
    if ":" in text:
        shape, dtype, fill = described(text, "--input")
        return FILLS[fill](shape).astype(dtype)
    if is_integer(text):
        return integer(text, "--input", bits=64)
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is neither a .npy file nor a number nor SHAPE:DTYPE[:FILL]"
        ) from None


def array_of_file(path: str) -> Any:
    """Reads a .npy file."""
    try:
        return mx.load(path)
    except RuntimeError as error:
        raise ValueError(f"--input {path!r}, expected a .npy file: {error}") from None


def is_integer(text: str) -> bool:
    """Returns whether a text is decimal digits, with a sign or not."""
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdecimal()


def integer(text: str, option: str, bits: int = 32) -> int:
    """Reads an integer of so many bits, the sign included."""
    most = 2 ** (bits - 1) - 1
    if len(text) > bits or not -most - 1 <= int(text) <= most:
        raise ValueError(f"{option} {text}, expected an integer of {bits} bits")
    return int(text)


def described(text: str, option: str) -> tuple[list[int], mx.Dtype, str]:
    """Reads SHAPE:DTYPE[:FILL], such as 8x512:float16:random."""
    shape, _, rest = text.partition(":")
    dtype, _, fill = rest.partition(":")
    sizes = shape.split("x")
    known = isinstance(getattr(mx, dtype, None), mx.Dtype)
    if not known or not all(map(is_natural, sizes)) or (fill and fill not in FILLS):
        raise ValueError(f"{option} {text!r}, expected such as 8x512:float16:random")
    lengths = [integer(size, option) for size in sizes]
    if math.prod(lengths) > MOST_ELEMENTS:
        raise ValueError(
            f"{option} {text!r} has {math.prod(lengths)} elements, expected at most "
            f"{MOST_ELEMENTS}"
        )
    return lengths, getattr(mx, dtype), fill or "random"


def byte_count(text: str) -> int:
    """Reads the size of a parameter in threadgroup memory."""
    if not is_natural(text):
        raise ValueError(f"--threadgroup-memory {text!r}, expected a number of bytes")
    return integer(text, "--threadgroup-memory")


def is_natural(text: str) -> bool:
    """Returns whether a text is decimal digits."""
    return text.isascii() and text.isdecimal()


def template(text: str) -> tuple[str, mx.Dtype | int | bool]:
    """Reads NAME=VALUE, with a number, true, false or a dtype."""
    name, value = named(text, "--template")
    if value in ("true", "false"):
        return name, value == "true"
    if is_integer(value):
        return name, integer(value, f"--template {name}")
    if not isinstance(getattr(mx, value, None), mx.Dtype):
        raise ValueError(f"--template {text!r}, expected a number, a flag or a dtype")
    return name, getattr(mx, value)


def triple(text: str, option: str) -> tuple[int, int, int]:
    """Reads X, X,Y or X,Y,Z; what is left out is 1."""
    parts = text.split(",")
    if len(parts) > 3 or not all(map(is_natural, parts)):
        raise ValueError(f"{option} {text!r}, expected one to three numbers")
    x, y, z = [*(integer(part, option) for part in parts), 1, 1][:3]
    return x, y, z


def grid(text: str) -> tuple[int, int, int]:
    """Reads the threads of a grid."""
    sizes = triple(text, "--grid")
    if math.prod(sizes) > MOST_THREADS:
        raise ValueError(
            f"--grid {text} has {math.prod(sizes)} threads, expected at most "
            f"{MOST_THREADS}"
        )
    return sizes


def dtype_of(array: mx.array) -> str:
    """Returns the name of an array's dtype."""
    return str(array.dtype).removeprefix("mlx.core.")
