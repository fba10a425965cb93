"""The options of the command."""

import argparse
from pathlib import Path
from typing import Any

from metal_emulator.command_line import output

_SEVERAL: dict[str, Any] = {"action": "append", "default": []}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="the body of a kernel, or whole kernels: `kernel void f(...)`",
    )
    _add_text_arguments(parser)
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
    report.add_argument(
        "--json",
        dest="json_file",
        nargs="?",
        const=output.STDOUT,
        type=Path,
        metavar="FILE",
        help="write the result as JSON too; without FILE, print JSON instead of text",
    )


def _add_text_arguments(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("text")
    text.add_argument(
        *("--entry", "--kernel"),
        metavar="NAME",
        help="the kernel or host name to run, if FILE has several",
    )
    text.add_argument(
        "--constant",
        metavar="NAME=VALUE",
        help="a function constant, by name or index; a vector's numbers with commas",
        **_SEVERAL,
    )
    text.add_argument(
        "--template",
        metavar="NAME=VALUE",
        help="a template argument: a number, true, false, a dtype or a type of Metal",
        **_SEVERAL,
    )
    text.add_argument(
        "--header", type=Path, metavar="FILE", help="text before the kernel", **_SEVERAL
    )
    text.add_argument(
        "--include",
        type=Path,
        metavar="FOLDER",
        help='where `#include "..."` finds files, besides the folder of FILE',
        **_SEVERAL,
    )


def _add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    kernel = parser.add_argument_group("arguments")
    kernel.add_argument("--input", metavar="NAME=ARRAY", help="an input", **_SEVERAL)
    kernel.add_argument("--output", metavar="NAME=ARRAY", help="an output", **_SEVERAL)
    kernel.add_argument(
        "--threadgroup-memory",
        metavar="NAME=BYTES",
        help="size of a parameter [[threadgroup(n)]] of a whole kernel",
        **_SEVERAL,
    )
    kernel.add_argument(
        "--init-value", type=float, metavar="VALUE", help="initial value of outputs"
    )
    kernel.add_argument(
        "--atomic-outputs", action="store_true", help="declare a body's outputs atomic"
    )


def _add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    launch = parser.add_argument_group("launch")
    launch.add_argument("--grid", metavar="X[,Y[,Z]]", help="threads of the grid")
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
