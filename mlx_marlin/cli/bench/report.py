"""The output of `mlx-marlin bench`: tables, each line with what its times are."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mlx_marlin.measure.result_file import ResultFile
from mlx_marlin.measure.row_encoding import PROBLEM
from mlx_marlin.measure.rows import (
    CHAIN,
    CLOCKS,
    STOCK,
    STOCK_MODEL,
    FirstTokenRow,
    GenerationRow,
    MachineFacts,
    ProductRow,
    Timing,
)
from mlx_marlin.planning.choice import aligned

PREDICTED = "Nothing was measured: every time is predicted, for a GPU like this one."
MEASURED = "Medians, +- half the interquartile range."
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


def product(rows: Sequence[ProductRow], notes: Sequence[str]) -> str:
    """Returns the table of a product: a line for each arm, with both clocks.

    Args:
        rows: The rows of one product.
        notes: What was left out or is doubtful.
    """
    by_arm: dict[tuple[str, str], dict[str, ProductRow]] = {}
    for row in rows:
        by_arm.setdefault((row.arm, row.problem.layout), {})[row.clock] = row
    stock = by_arm[STOCK, "mlx"][CHAIN].timing.seconds
    table = [["", *CLOCKS, "x stock, chain", ""]]
    for (arm, layout), clocks in by_arm.items():
        table.append(
            [
                f"{arm}, {layout} layout",
                *(_microseconds(clocks[clock].timing) for clock in CLOCKS),
                f"{stock / clocks[CHAIN].timing.seconds:.2f}",
                mark(clocks[CHAIN].timing),
            ]
        )
    handovers = {row.handover for row in rows if row.handover}
    served = [f"stock MLX would serve this call: {reason}" for reason in handovers]
    title = replace(rows[0].problem, layout="mlx").explain()
    title = title.removesuffix(", mlx layout")
    return "\n".join([title, aligned(table), *served, *notes])


def generation(rows: Sequence[GenerationRow]) -> str:
    """Returns the table of a model's speeds: a line for each arm and streams."""
    stock = {row.streams: row for row in rows if row.arm == STOCK_MODEL}
    table = [["streams", "", "prompt", "generation", "x stock", ""]]
    for row in rows:
        ratio = row.generation_rate / stock[row.streams].generation_rate
        table.append(
            [
                str(row.streams),
                row.arm,
                f"{row.prompt_rate:.1f} tokens/s",
                f"{row.generation_rate:.1f} tokens/s",
                f"{ratio:.2f}",
                mark(row.step),
            ]
        )
    bound = (
        "" if _is_measured(rows[0].step) else ", of the products of quantized layers"
    )
    title = f"{rows[0].model}, prompts of {rows[0].prompt_tokens} tokens{bound}"
    return f"{title}\n{aligned(table)}"


def first_tokens(rows: Sequence[FirstTokenRow]) -> str:
    """Returns the table of times to the first token in a new process."""
    table = [["first token", "cold, with compiling", "warm", ""]]
    for row in rows:
        cold, warm = (f"{t.seconds * 1e3:.1f} ms" for t in (row.cold, row.warm))
        table.append([row.arm, cold, warm, mark(row.warm)])
    return f"{rows[0].model}, one prompt of {rows[0].prompt_tokens} tokens\n" + aligned(
        table
    )


def mark(timing: Timing) -> str:
    """Returns what a time is: measured, or predicted and how."""
    return "measured" if _is_measured(timing) else f"predicted ({timing.method})"


def csv_text(result: ResultFile) -> str:
    """Returns a result as CSV, a line for each time."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    facts = {name: getattr(result.machine, name) for name in COLUMNS[-7:]}
    for timing, values in _times(result):
        writer.writerow(
            {
                **values,
                "milliseconds": f"{timing.seconds * 1e3:.6g}",
                "range_ms": f"{timing.range * 1e3:.6g}",
                "samples": timing.samples,
                "drift": f"{timing.drift:.4f}",
                "source": timing.source,
                "method": timing.method,
                "date": result.date,
                **facts,
            }
        )
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


def _is_measured(timing: Timing) -> bool:
    return timing.source == "measured"


def _microseconds(timing: Timing) -> str:
    text = f"{timing.seconds * 1e6:.2f} us"
    if not _is_measured(timing):
        return text
    return f"{text} +- {timing.range / 2 * 1e6:.2f}"
