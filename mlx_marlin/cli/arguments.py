"""Arguments that several commands share, and how they are read."""

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any

from mlx_marlin.backends import devices
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.weights.formats import DTYPE_BYTES, LAYOUTS, MODES

SHAPE = re.compile(r"(?:(\d{1,10})[x,])?(\d{1,10})[x,](\d{1,10})")
"""MxNxK or M,N,K; NxK or N,K for several M."""
BOTH = "both"
"""Value of `--layout` for all layouts."""
FORMAT = ("mode", "bits", "group_size")
"""Options that say how a weight is quantized."""


def add_format(
    group: "argparse._ActionsContainer", modes: Sequence[str] = MODES, default: str = ""
) -> None:
    """Adds the options of `FORMAT`; they are None if they are not given."""
    group.add_argument("--mode", choices=modes, help=f"default: affine{default}")
    group.add_argument("--bits", type=int, help="bits of a code; default: the mode's")
    group.add_argument("--group-size", type=int, help=f"default: the mode's{default}")


def add_dtype(group: "argparse._ActionsContainer", default: str = "float16") -> None:
    """Adds `--dtype`, which is None if it is not given."""
    group.add_argument(
        "--dtype",
        choices=list(DTYPE_BYTES),
        help=f"dtype of activations; default: {default}",
    )


def add_layout(
    group: "argparse._ActionsContainer", *more: str, default: str = "that of `optimize`"
) -> None:
    """Adds `--layout`, which is None if it is not given."""
    group.add_argument(
        "--layout",
        choices=(*LAYOUTS, *more),
        help=f"layout of the weights; default: {default}",
    )


def add_chip(parser: "argparse._ActionsContainer", verb: str) -> None:
    """Adds `--chip`; the verb says what is done for the chip."""
    parser.add_argument(
        "--chip",
        metavar="NAME",
        help=f'chip to {verb} for, such as "M3 Max", "M3 Max, 30 cores" or "H200"; '
        f"default: this machine",
    )


def add_rows(
    group: "argparse._ActionsContainer", default: Iterable[int], more: str = ""
) -> None:
    """Adds `--rows`, which is None if it is not given."""
    text = f"rows of the activations (M); default: {listed(default)}{more}"
    group.add_argument("--rows", help=text)


def add_streams(group: "argparse._ActionsContainer", default: Iterable[int]) -> None:
    """Adds `--streams`, which is None if it is not given."""
    group.add_argument("--streams", help=f"prompts at once; default: {listed(default)}")


def streams(
    args: argparse.Namespace, default: Sequence[int], most: int
) -> Sequence[int]:
    """Returns the numbers of prompts at once, each of them once."""
    found = numbers(args.streams, "--streams") if args.streams else default
    for count in found:
        check_range("--streams", count, 1, most)
    return [*dict.fromkeys(found)]


def device(name: str | None, cores: int | None = None) -> PlanningDevice:
    """Returns the device to plan for."""
    if name is not None:
        return devices.named(name, cores)
    here: PlanningDevice = devices.current()
    return here if cores is None else here.with_cores(cores)


def problem(
    args: argparse.Namespace, m: int, n: int, k: int, layout: str, **more: Any
) -> Problem:
    """Returns a product in the format and with the dtype that the options choose."""
    return problem_of(
        *(m, n, k),
        mode=args.mode or "affine",
        bits=args.bits,
        group_size=args.group_size,
        dtype=args.dtype or "float16",
        layout=layout,
        **more,
    )


def refuse_format_of_model(args: argparse.Namespace, name: str) -> None:
    """Refuses options of a format for a model, whose layers have one."""
    for option in FORMAT:
        if (value := getattr(args, option)) is not None:
            raise ValueError(
                f"--{option.replace('_', '-')} {value} is not for a model: {name!r} "
                f"has its own"
            )


def check_range(option: str, value: float, least: float, most: float) -> None:
    """Refuses a number that is out of range."""
    if not least <= value <= most:
        raise ValueError(f"{option} {value:.12g}, expected {least:.12g} to {most:.12g}")


def numbers(text: str, option: str = "--rows") -> list[int]:
    """Parses positive integers, such as "1,4,8"."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option} {text!r}, expected numbers such as 1,2,4,8")
    return [int(part) for part in parts]


def listed(values: Iterable[int]) -> str:
    """Returns numbers separated by commas, as `numbers` parses them."""
    return ",".join(map(str, values))


def shape(text: str) -> tuple[int | None, int, int] | None:
    """Returns m, if it is given, n and k of a shape, or None if it is not a shape."""
    found = SHAPE.fullmatch(text)
    if found is None:
        return None
    m, n, k = found.groups()
    return (int(m) if m else None), int(n), int(k)


def product(text: str, option: str = "") -> tuple[int, int, int]:
    """Returns m, n and k of a shape."""
    m, n, k = shape(text) or (None, 0, 0)
    if m is None:
        where = f"{option} {text!r}".strip()
        raise ValueError(f"{where}, expected MxNxK such as 8x4096x4096")
    return m, n, k
