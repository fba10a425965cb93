"""Compiles our kernels with Apple's compilers for every generation, without a GPU.

Each instance is written as MLX hands it to Metal and compiled under MLX's flags, then
for the architectures that would run it. The file that is written has errors, warnings,
registers, spilled bytes, code sizes, seconds and versions. First the compilers compile
kernels with known numbers of live values: an architecture for which these do not
compile is unknown to the compilers, and one where they are read wrongly has no figures.

The exit status is 1 if an instance does not compile, or spills where the planner may
choose it, and 2 if the compilers are missing or know no architecture.

Usage: python -m benchmarks.census --out census.json [--shard I/N] [--format NAME]
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from os import cpu_count
from pathlib import Path
from typing import Any

from benchmarks import apple_tools, census_instances, gpu_binary
from benchmarks.apple_tools import ARCHITECTURES, Toolchain, ToolError
from benchmarks.census_instances import Instance
from benchmarks.census_table import SCHEMA, VERSION
from metal_emulator.static.versions import parsed
from mlx_marlin.backends.metal.detection import TENSOR_SYSTEM
from mlx_marlin.backends.source import digest_of_shaders

LIMIT = 120.0
"""Seconds of a compiler for one instance."""
LIVE = (8, 32, 96, 120)
"""Live floats of the kernels of the self-check."""
NEVER_SPILLING = 32
"""Live floats that fit the registers of a thread everywhere."""
OVERHEAD = 24
"""Most further registers of such a kernel: addresses, counters and the factor. 4 are
published for g16s and g17s."""
SHOWN = 3
"""Warnings of an instance that are kept."""
MOST_FAULTS = 20
"""Lines that are printed of what failed."""
Row = dict[str, Any]


def main(given: Sequence[str] | None = None) -> int:
    """Writes the census; the module's docstring has the exit status."""
    args = _arguments(given)
    try:
        tools = apple_tools.find(args.limit)
    except ToolError as error:
        print(f"census: {error}", file=sys.stderr)
        return 2
    instances = _selected(args)
    if not instances:
        print(f"census: no instance has the format {args.format!r}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checks = {each: self_check(tools, each, folder) for each in ARCHITECTURES}
        known = {each for each in ARCHITECTURES if checks[each]["known"]}
        if not known:
            print(f"census: {checks[ARCHITECTURES[0]]['reason']}", file=sys.stderr)
            return 2
        rows = compiled(tools, instances, known, folder)
    _write(args.out, tools, checks, rows)
    for architecture, check in checks.items():
        if not check["read"]:
            print(f"::warning::{architecture}: {check['reason']}")
    found = faults(rows, checks)
    print("\n".join(f"::error::{each}" for each in found[:MOST_FAULTS]))
    print(f"census: {len(rows)} instances, {len(found)} failed, {tools.version}")
    return int(bool(found))


def live_kernel(count: int) -> str:
    """Returns a kernel in whose loop `count` floats are alive at once."""
    names = [f"v{index}" for index in range(count)]
    begin = [f"float {name} = x[i + {index}];" for index, name in enumerate(names)]
    turns = zip(names, [*names[1:], names[0]], strict=True)
    loop = [f"{name} = {name} * factor + {after};" for name, after in turns]
    return "\n".join(
        [
            f"kernel void live_{count}(const device float* x [[buffer(0)]],",
            "device float* out [[buffer(1)]], constant int& turns [[buffer(2)]],",
            "uint i [[thread_position_in_grid]]) {",
            "const float factor = x[0];",
            *begin,
            "for (int turn = 0; turn < turns; ++turn) {",
            *loop,
            f"}}\nout[i] = {' + '.join(names)};\n}}\n",
        ]
    )


def self_check(tools: Toolchain, architecture: str, folder: Path) -> Row:
    """Returns whether an architecture is known and its figures are read, or why not."""
    found: dict[str, list[int]] = {}
    check: Row = {"known": False, "read": False, "reason": "", "found": found}
    try:
        files = [_live_file(tools, each, architecture, folder) for each in LIVE]
    except ToolError as error:
        return check | {"reason": f"unknown: {error}"}
    check["known"] = True
    wrong = []
    for count, data in zip(LIVE, files, strict=True):
        try:
            figures = gpu_binary.figures(data)
        except ValueError as error:
            return check | {"reason": f"figures are unread: {error}"}
        read = [figures.registers, figures.spilled_bytes]
        found[str(count)] = read
        if not _is_plausible(count, *read):
            wrong.append(f"{count} live floats as {read[0]} registers, {read[1]} bytes")
    reason = f"figures are unread: {'; '.join(wrong)}" if wrong else ""
    return check | {"read": not wrong, "reason": reason}


def _live_file(tools: Toolchain, count: int, architecture: str, folder: Path) -> bytes:
    library = folder / f"{architecture}-{count}.metallib"
    tools.compile(live_kernel(count), library)
    return tools.translate(library, f"live_{count}", architecture)


def _is_plausible(live: int, registers: int, spilled: int) -> bool:
    if spilled and live > NEVER_SPILLING:
        return registers > NEVER_SPILLING
    return not spilled and live <= registers <= live + OVERHEAD


def compiled(
    tools: Toolchain,
    instances: Sequence[Instance],
    known: set[str],
    folder: Path,
) -> list[Row]:
    """Compiles instances, several at a time; returns their rows of the file."""
    work = partial(_row, tools, known, folder)
    with ThreadPoolExecutor(cpu_count()) as pool:
        return [*pool.map(work, range(len(instances)), instances)]


def _row(
    tools: Toolchain, known: set[str], folder: Path, index: int, instance: Instance
) -> Row:
    row = asdict(instance) | {"error": None, "warnings": [], "compiled": {}}
    del row["text"], row["others"]
    if instance.is_tensor and parsed(tools.macos) < TENSOR_SYSTEM:
        return row | {"skipped": f"macOS {tools.macos} has no tensor operations"}
    library = folder / f"{index}.metallib"
    begun = time.monotonic()
    try:
        said = tools.compile(instance.text, library)
    except ToolError as error:
        return row | {"error": str(error)}
    row["seconds"] = round(time.monotonic() - begun, 2)
    warnings = re.findall(r"warning: .*", said)
    row["warnings"] = [*dict.fromkeys(warnings)][:SHOWN]
    for architecture in instance.architectures:
        if architecture in known:
            translated = _translated(tools, library, instance.function, architecture)
            row["compiled"][architecture] = translated
    for file in folder.glob(f"{index}.*"):
        file.unlink()
    return row


def _translated(
    tools: Toolchain, library: Path, function: str, architecture: str
) -> Row:
    begun = time.monotonic()
    try:
        data = tools.translate(library, function, architecture)
        found: Row = asdict(gpu_binary.figures(data))
    except ToolError as error:
        found = {"error": str(error)}
    except ValueError as error:
        found = {"unread": str(error)}
    return found | {"seconds": round(time.monotonic() - begun, 2)}


def faults(rows: Iterable[Row], checks: Mapping[str, Row]) -> list[str]:
    """Returns a sentence for every error, and every spill of a chosen instance."""
    found = []
    for row in rows:
        name = f"{row['kernel']} ({row['template']})"
        if row["error"]:
            found.append(f"{name}: {row['error']}")
        for architecture, figures in row["compiled"].items():
            where = f"{name} for {architecture}"
            if "error" in figures:
                found.append(f"{where}: {figures['error']}")
            elif not checks[architecture]["read"]:
                continue
            elif "unread" in figures:
                found.append(f"{where} cannot be read: {figures['unread']}")
            elif figures["spilled_bytes"] and architecture in row["chosen"]:
                found.append(f"{where} spills {figures['spilled_bytes']} bytes")
    return found


def _write(
    path: Path, tools: Toolchain, checks: Mapping[str, Row], rows: Sequence[Row]
) -> None:
    machine = {
        "metal": tools.version,
        "standard": tools.standard,
        "macos": tools.macos,
        "mlx": version("mlx"),
        "kernels": digest_of_shaders(),
    }
    content = {
        "schema": SCHEMA,
        "version": VERSION,
        "machine": machine,
        "self_check": checks,
        "instances": rows,
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _selected(args: argparse.Namespace) -> list[Instance]:
    instances = census_instances.every_instance()
    if args.format is not None:
        instances = [each for each in instances if each.format == args.format]
    if args.quick and instances:
        instances = census_instances.quick(instances)
    return census_instances.shard(instances, *args.shard)


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r}, expected one such as 1/4")
    return int(found[1]), int(found[2])


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.census", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="part I of N"
    )
    parser.add_argument(
        "--format", metavar="NAME", help='only codes and bits such as "affine-4"'
    )
    parser.add_argument(
        "--quick", action="store_true", help="40 instances, of every kernel one"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT,
        help=f"seconds of a compiler for one instance; default: {LIMIT:g}",
    )
    args = parser.parse_args(given)
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no such folder")
    return args


if __name__ == "__main__":
    sys.exit(main())
