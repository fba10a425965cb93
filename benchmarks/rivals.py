"""Products on our kernels, on MLX's and on mlx-dspark's, counted: one table.

8x8 products, bytes that simdgroups request of device memory, bytes that loads return to
lanes, and threads are the emulator's. Issue slots for 2,048 weights, registers and
spills come from an open compiler for the M1's GPU, where AGX_HOME names it (see
benchmarks/agx.py). Nothing is timed. MLX and mlx-dspark are downloaded.

Few columns of each product are run, and the counts multiplied: each is a sum over
threadgroups, and those with equally many columns do the same. `--exact` runs all of
them as well, and fails if a count differs.

Usage: python -m benchmarks.rivals [--rows 8,16] [--bits 4] [--layout marlin]
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from benchmarks import agx, rival_calls, rival_slots
from benchmarks.rival_calls import Counted
from benchmarks.rival_slots import Slots
from mlx_marlin.backends import devices
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.plan import MetalPlan
from mlx_marlin.cli import arguments
from mlx_marlin.planning.problem import Problem, problem_of

SHAPES = ("17408x5120", "5120x17408", "4096x4096", "14336x4096")
"""n and k."""
ROWS = (1, 2, 3, 4, 8, 16, 24, 32)
BITS = (4, 8)
DTYPES = ("float16", "bfloat16")
CHIP = "M4 Pro"
WHOLE = {"strategy": "data_parallel", "simdgroups_k": 4}
"""Fields of the plans of the lab's tables of registers."""
HEAD = (
    *("product", "bits", "x", "rows", "kernels"),
    *("8x8 products", "MB", "lane MB", "threads", "slots", "registers", "spills"),
)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Who computes a product, and what it costs; slots are None if not counted."""

    counted: Counted
    slots: Slots | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One product on all arms."""

    problem: Problem
    ours: Arm
    mlx: Arm
    rival: Arm

    def cells(self) -> list[str]:
        """Returns the cells of the table: ours, and ours over MLX's and the rival's."""
        problem, arms = self.problem, (self.ours, self.mlx, self.rival)
        names = [arm.counted.kernel for arm in arms[:2]]
        counted = [arm.counted for arm in arms]
        slots = [arm.slots for arm in arms]
        return [
            f"{problem.k}→{problem.n}",
            str(problem.bits),
            problem.dtype,
            str(problem.m),
            ", ".join(names),
            _compared([each.matrix for each in counted]),
            _compared([each.bytes for each in counted], 1e6),
            _compared([each.lane_bytes for each in counted], 1e6),
            _compared([each.threads for each in counted]),
            _compared([each and each.slots for each in slots]),
            _compared([each and each.registers for each in slots]),
            " ".join("?" if each is None else str(each.spills) for each in slots),
        ]


def _compared(values: Sequence[int | None], unit: float = 1) -> str:
    """Returns our value, and in brackets its ratios to MLX's and the rival's."""
    ours, *others = values
    if ours is None:
        return "?"
    shown = f"{ours:,}" if unit == 1 else f"{ours / unit:,.1f}"
    return f"{shown} ({', '.join(_ratio(ours, other) for other in others)})"


def _ratio(ours: int, other: int | None) -> str:
    if other is None:
        return "?"
    return f"{ours / other:.3f}" if other else "-"


def compare(
    problem: Problem, device: Device, plan: MetalPlan, *, exact: bool, with_slots: bool
) -> Row:
    """Counts one product on all arms.

    Raises:
        ValueError: If counts of all columns differ from those of few, multiplied.
    """
    calls: tuple[Callable[..., Counted], ...] = (
        lambda **more: rival_calls.ours(problem, plan, **more),
        lambda **more: rival_calls.mlx(problem, device, **more),
        lambda **more: rival_calls.rival(problem, **more),
    )
    counted = [call() for call in calls]
    for call, few in zip(calls if exact else (), counted, strict=False):
        if (every := call(exact=True)) != few:
            raise ValueError(f"{problem}: {few} from few columns, {every} from all")
    slots: list[Slots | None] = [None] * 3
    if with_slots:
        slots = [
            rival_slots.ours(plan),
            rival_slots.mlx(problem, device),
            rival_slots.rival(problem),
        ]
    ours, mlx, rival = (
        Arm(counted=each, slots=found)
        for each, found in zip(counted, slots, strict=True)
    )
    return Row(problem=problem, ours=ours, mlx=mlx, rival=rival)


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    """Yields the compared products in the order of the table."""
    device = devices.named(asked.chip or CHIP)
    if not isinstance(device, Device):
        raise ValueError(f"--chip {asked.chip!r}, expected an Apple GPU")
    fields = WHOLE if asked.whole else {}
    with_slots = agx.missing() is None and not asked.no_slots
    numbers = arguments.numbers(asked.rows) if asked.rows else ROWS
    for text, bits, dtype, m in product(
        asked.shapes, asked.bits, asked.dtypes, numbers
    ):
        shape = arguments.shape(text)
        if shape is None or shape[0] is not None or shape[1] % rival_calls.COLUMNS:
            raise ValueError(
                f"--shapes {text!r}, expected NxK such as 17408x5120, n a multiple of "
                f"{rival_calls.COLUMNS}"
            )
        _, n, k = shape
        layout = asked.layout or "mlx"
        problem = problem_of(m, n, k, bits=bits, dtype=dtype, layout=layout)
        plan = rival_calls.plan_of(problem, device, **fields)
        yield compare(problem, device, plan, exact=asked.exact, with_slots=with_slots)


def heading(asked: argparse.Namespace) -> str:
    """Returns what the table shows and how it was counted."""
    slots = "not counted" if asked.no_slots else agx.missing() or "Mesa, G13"
    plans = "whole tiles, four simdgroups along k" if asked.whole else "the planner's"
    run = "few, multiplied"
    if asked.exact:
        run += "; all as well, and a difference ends the table"
    return (
        f"Our value (ours / MLX {rival_calls.mlx_headers.MLX}, ours / mlx-dspark "
        f"{rival_calls.dspark.VERSION}). Counted, not timed.\n"
        f"Chip {asked.chip or CHIP}, layout {asked.layout or 'mlx'}, groups of 64; "
        f"our plans: {plans}.\n"
        f"Columns that are run: {run}. MLX's sum of its parts of k is left out.\n"
        "skinny_qmm reads bfloat16; at float16 it is a translation of ours. "
        "mlx-dspark calls it for 5 to 16 rows (8 bits: 6 to 16).\n"
        "Slots for 2,048 weights, registers of 16 bits, spills of all three: "
        f"{slots}."
    )


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rivals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shapes", nargs="+", default=SHAPES, metavar="NxK", help="weights")
    add("--bits", nargs="+", type=int, choices=BITS, default=BITS)
    add("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="of x and scales")
    arguments.add_rows(parser, ROWS)
    arguments.add_layout(parser, default="mlx")
    arguments.add_chip(parser, "plan")
    add("--whole", action="store_true", help="whole tiles, four simdgroups along k")
    add("--exact", action="store_true", help="run all columns, too, and compare")
    add("--no-slots", action="store_true", help="leave the AGX aid out")
    add("--json", type=Path, metavar="FILE", help="write the counts of all arms")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Prints the table; returns 2 if an argument is wrong or a count differs."""
    asked = _arguments(given)
    print(heading(asked), "", _line(HEAD), "|---" * len(HEAD) + "|", sep="\n")
    found = []
    try:
        for row in rows(asked):
            found.append(row)
            print(_line(row.cells()), flush=True)
    except ValueError as error:
        print(f"rivals: {error}", file=sys.stderr)
        return 2
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    return 0


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
