"""The heading and the CSV file of `mlx-marlin bench`."""

import csv
import io
from collections.abc import Iterator
from typing import Any

from mlx_marlin.measure.result_file import PROBLEM, ResultFile, timing
from mlx_marlin.measure.rows import (
    MachineFacts,
    Timing,
)

PREDICTED = "Nothing was measured: every time is predicted, for a GPU like this one."
MEASURED = "Medians, and the interquartile range."
COLUMNS = (
    *("kind", "model", "streams", *PROBLEM, "arm", "clock"),
    *("milliseconds", "range_ms", "samples", "drift", "source", "method"),
    *("date", "chip", "cores", "system", "build", "mlx", "mlx_marlin", "commit"),
)
"""Columns of the CSV file."""


def heading(machine: MachineFacts, is_measured: bool) -> str:
    """Returns the machine, and whether anything is measured on it."""
    return (
        f"{machine.chip}, {machine.cores} cores, {machine.system}, MLX {machine.mlx}, "
        f"commit {machine.commit or 'unknown'}\n"
        f"{MEASURED if is_measured else PREDICTED}\n"
    )


def csv_text(result: ResultFile) -> str:
    """Returns a result as CSV, a line for each time."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    facts = {name: getattr(result.machine, name) for name in COLUMNS[-7:]}
    for found, values in _times(result):
        writer.writerow({**values, **timing(found), "date": result.date, **facts})
    return stream.getvalue()


def _times(result: ResultFile) -> Iterator[tuple[Timing, dict[str, Any]]]:
    """Yields each time with the columns that say what it is the time of."""
    for row in result.products:
        problem = {name: getattr(row.problem, name) for name in PROBLEM}
        yield (
            row.timing,
            {"kind": "product", **problem, "arm": row.arm, "clock": row.clock},
        )
    for speed in result.generation:
        values = {"model": speed.model, "streams": speed.streams, "arm": speed.arm}
        yield speed.prompt, {"kind": "prompt", **values}
        yield speed.step, {"kind": "step", **values}
    for first in result.first_tokens:
        values = {"model": first.model, "streams": 1, "arm": first.arm}
        yield first.cold, {"kind": "first token, cold", **values}
        yield first.warm, {"kind": "first token, warm", **values}
