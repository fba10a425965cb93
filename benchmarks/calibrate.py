"""Refits the cost model's constants to a measured result file, and prints the changes.

`rates_fit` says what is fitted, and how. Files of the census are compared with our
counts of registers and instructions, and their table is written into docs/results.md.
Nothing else is written: what should change is printed.

Usage: python -m benchmarks.calibrate FILE [FILE ...]
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks import census_table
from benchmarks.rates_fit import (
    Constants,
    Fit,
    assumed,
    device_of,
    fit,
    measured_seconds,
    predicted,
    present,
    rows_of,
)
from benchmarks.stock import decision
from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.measure import result_file, rows
from mlx_marlin.measure.rows import ProductRow
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.tables import aligned


def changes(found: Fit, before: Constants) -> str:
    """Returns a table of the constants before and after."""
    table = [["constant", "now", "fitted", "+-", ""]]
    fitted_values = found.constants.values()
    for name, now in before.values().items():
        after = fitted_values[name]
        if name == "overhead":
            cells = ["not in the model", f"{after * 1e6:.2f} us a product (fitted)"]
        else:
            cells = [f"{now:.4g}", f"{after:.4g}"]
        note = "" if name in found.determined else "not determined by this file alone"
        table.append([name, *cells, f"{found.errors[name]:.1%}", note])
    return aligned(table)


def residuals(rows: Sequence[ProductRow], device: Device, found: Fit) -> str:
    """Returns a table of measured times and the model's errors, before and after."""
    overhead = found.constants.overhead
    before = [predicted(row, device) + overhead for row in rows]
    with assumed(found.constants, device):
        after = [predicted(row, device) + overhead for row in rows]
    table = [["rows x k→n", "arm", "measured", "error now", "error fitted"]]
    for row, old, new in zip(rows, before, after, strict=True):
        seconds, problem = row.timing.seconds, row.problem
        table.append(
            [
                f"{problem.m} x {problem.k}→{problem.n}",
                f"{row.arm}, {problem.layout} layout",
                f"{seconds * 1e6:.2f} us (measured)",
                f"{old / seconds - 1:+.0%}",
                f"{new / seconds - 1:+.0%}",
            ]
        )
    errors = [
        float(np.median(np.abs(np.array(times) / measured_seconds(rows) - 1)))
        for times in (before, after)
    ]
    return (
        f"{aligned(table)}\nmedian error: {errors[0]:.1%} now, {errors[1]:.1%} fitted"
    )


def changed_plans(problems: Sequence[Problem], device: Device, found: Fit) -> list[str]:
    """Returns the products whose plan, or whose server, the fit changes."""

    def decided() -> list[tuple[str, bool]]:
        return [
            (
                planner.choose(problem, device).explain(),
                not decision.by_our_kernels(problem, device),
            )
            for problem in problems
        ]

    before = decided()
    with assumed(found.constants, device):
        after = decided()
    lines = []
    for problem, (old, was_stock), (new, is_stock) in zip(
        problems, before, after, strict=True
    ):
        if was_stock != is_stock:
            servers = ("our kernels", "stock MLX")
            change = f"{servers[was_stock]} -> {servers[is_stock]}"
        elif old != new and not is_stock:
            change = f"{old} -> {new}"
        else:
            continue
        lines.append(f"{problem.explain()}: {change}")
    return lines


def judged() -> list[Problem]:
    """Returns the products whose plans are compared: those of `mlx-marlin bench`."""
    return [problem_of(m, n, k) for (k, n), m in product(rows.SHAPES, rows.ROWS)]


def main(given: Sequence[str] | None = None) -> int:
    """Prints what files say; returns 2 if they cannot calibrate the model."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibrate", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="a result file of a Mac, or all files of a census",
    )
    args = parser.parse_args(given)
    try:
        if census_table.is_census(args.files[0]):
            census = census_table.publish(args.files, census_table.DOCUMENT)
            print(census_table.table(census))
            print("\n".join(["", *census_table.proposals(census)]))
            return 0
        if args.files[1:]:
            raise ValueError(f"{args.files[1]}: expected one result file")
        result = result_file.read(args.files[0])
        device, rows = device_of(result), rows_of(result)
    except (ValueError, OSError) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 2
    found = fit(rows, device)
    print(f"{device.variant}, {len(rows)} measured rows\n")
    print(changes(found, present(device)))
    print(f"\n{residuals(rows, device, found)}")
    problems = judged()
    plans = changed_plans(problems, device, found)
    print(f"\n{len(plans)} of {len(problems)} products change, by the model:")
    print("\n".join(plans))
    return 0


if __name__ == "__main__":
    sys.exit(main())
