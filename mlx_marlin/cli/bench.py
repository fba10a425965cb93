"""`mlx-marlin bench`: times our kernels and stock MLX on this machine."""

import argparse
import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_marlin import progress, regular_files, tables
from mlx_marlin.backends import selection
from mlx_marlin.cli import arguments, documents, models, output
from mlx_marlin.cli.arguments import BOTH
from mlx_marlin.lm import measured_models
from mlx_marlin.measure import machine, products, result_file, rows
from mlx_marlin.measure.result_file import ResultFile
from mlx_marlin.measure.rows import MachineFacts
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import this_machine

if TYPE_CHECKING:
    from collections import Counter

    from mlx_marlin.measure.clocks import Clock

MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
"""The modes of `mx.quantized_matmul`, with which our kernels are compared."""
SECONDS, LEAST_SECONDS, MAX_SECONDS = 1.0, 1e-9, 3600.0
MAX_TOKENS, MAX_STREAMS = 2**20, 1024

DESCRIPTION = """
Time products with our kernels, with mx.quantized_matmul, and with mx.dequantize and
mx.matmul: in chains, where each product needs the result of the previous one as in
decoding, and independently. With --model also tokens per second and the time to the
first token. Without a GPU the emulator checks the products, the cost model predicts the
times, and every line says so.
"""
EPILOG = """
examples:
  mlx-marlin bench
  mlx-marlin bench 8x4096x14336 4096x4096 --rows 1,4,8 --layout both --json result.json
  mlx-marlin bench --model mlx-community/Qwen3-4B-4bit --streams 1,8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="SHAPE",
        help="MxNxK or M,N,K; NxK for several M; default: layers of models of 4, 8 and "
        "27 billion weights, in the emulator a small one",
    )
    _add_products(parser)
    _add_model(parser)
    group = parser.add_argument_group("output")
    output.add_json(group)
    group.add_argument(
        "--csv", type=Path, metavar="FILE", help="write the times as a table"
    )


def _add_products(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("products")
    quick = f", in the emulator {arguments.listed(rows.QUICK_ROWS)}"
    arguments.add_rows(group, rows.ROWS, quick)
    arguments.add_format(group, MODES)
    arguments.add_dtype(group)
    arguments.add_layout(group, BOTH)
    group.add_argument(
        "--staged",
        action="store_true",
        help="compare gemm_register with gemm_staged, by buffers and loader "
        "simdgroups, and with gemm_tensor where there are tensor units",
    )
    group.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help=f"time limit for each product and clock; default: {SECONDS:g}",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--model", metavar="NAME", help="name or folder of a quantized mlx-lm model"
    )
    arguments.add_streams(group, rows.STREAMS)
    group.add_argument(
        "--prompt",
        type=int,
        default=rows.PROMPT,
        help=f"default: {rows.PROMPT} tokens",
    )
    group.add_argument(
        "--new",
        type=int,
        default=rows.NEW,
        help=f"tokens to generate; default: {rows.NEW}",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the times; returns 1 if a product of ours was wrong or a kernel failed."""
    _check_arguments(args)
    problems = _problems(args)
    for problem in problems:
        products.check(problem)
    if args.model:
        models.check(args.model)
    clock = models.clock(args.seconds)
    result = ResultFile(
        machine=machine.facts(this_machine.device()), date=date.today().isoformat()
    )
    print(heading(result.machine, clock.times_stock))
    faults: list[str] = []
    try:
        for problem in progress.shown(problems, "bench", "product"):
            faults += _time_products(problem, args, clock, result)
            _write(args, result)
        if args.model:
            _time_model(args, clock, result)
    finally:
        _write(args, result)  # so that an interrupted run keeps what it has
    return 1 if faults else 0


def _check_arguments(args: argparse.Namespace) -> None:
    arguments.check_range("--seconds", args.seconds, LEAST_SECONDS, MAX_SECONDS)
    arguments.check_range("--prompt", args.prompt, 1, MAX_TOKENS)
    arguments.check_range("--new", args.new, 4, MAX_TOKENS)
    _streams(args)
    if args.csv:
        output.check_folder(args.csv, "--csv")


def _streams(args: argparse.Namespace) -> Sequence[int]:
    return arguments.streams(args, rows.STREAMS, MAX_STREAMS)


def _problems(args: argparse.Namespace) -> list[Problem]:
    """Returns the products that the arguments specify, without duplicates."""
    is_on_gpu = selection.backend() in selection.ON_GPU
    given = arguments.numbers(args.rows) if args.rows else None
    usual = rows.ROWS if is_on_gpu else rows.QUICK_ROWS
    found: list[Problem] = []
    for m, n, k in _shapes(args, is_on_gpu):
        problem = arguments.problem(args, 1, n, k, "mlx")
        counts = given or (usual if m is None else [m])
        found += [replace(problem, m=count) for count in counts]
    return [*dict.fromkeys(found)]


def _shapes(
    args: argparse.Namespace, is_on_gpu: bool
) -> Iterator[tuple[int | None, int, int]]:
    for target in args.targets:
        shape = arguments.shape(target)
        if shape is None:
            raise ValueError(
                f"{target!r} is not a shape such as 8x4096x11008; a model is --model"
            )
        yield shape
    if not args.targets and not args.model:
        usual = rows.SHAPES if is_on_gpu else rows.QUICK_SHAPES
        yield from ((None, n, k) for k, n in usual)


def _time_products(
    problem: Problem, args: argparse.Namespace, clock: "Clock", result: ResultFile
) -> list[str]:
    """Adds the times of a product to the result, and returns what failed."""
    measured = products.measure(
        problem,
        this_machine.device(),
        clock,
        models.layouts(args.layout),
        staged=args.staged,
    )
    result.products.extend(measured.rows)
    notes = [*measured.faults, *measured.notes]
    result.notes.extend(notes)
    table = tables.printed(documents.products(measured.rows))
    progress.print_above("\n".join([table, *notes]))
    return measured.faults


def _time_model(args: argparse.Namespace, clock: "Clock", result: ResultFile) -> None:
    counts, _ = models.products(args.model, [models.layouts(args.layout)[0]])
    if clock.times_stock:
        _measure_model(args, result)
    else:
        _predict_model(args, counts, result)
    print(tables.printed(documents.generation(result.generation)))


def _measure_model(args: argparse.Namespace, result: ResultFile) -> None:
    from mlx_marlin.lm import generation  # it imports mlx-lm

    name, streams = measured_models.name_of_model(args.model), _streams(args)
    layout = None if args.layout in (None, BOTH) else args.layout
    load = partial(models.load_lazily, args.model)
    first = generation.first_tokens(name, load, layout, args.prompt)
    result.first_tokens.extend(progress.shown(first, "first token", "model", 2))
    print(tables.printed(documents.first_tokens(result.first_tokens)))
    arms = generation.models(load, layout)
    rows = generation.measure(name, arms, streams, args.prompt, args.new)
    total = len(streams) * len(arms)
    result.generation.extend(progress.shown(rows, "generation", "model", total))


def _predict_model(
    args: argparse.Namespace, counts: "Counter[Problem]", result: ResultFile
) -> None:
    from mlx_marlin.lm import generation  # it imports mlx-lm

    name, device = measured_models.name_of_model(args.model), this_machine.device()
    streams = _streams(args)
    result.generation.extend(
        generation.predict(name, counts, device, streams, args.prompt, args.new)
    )
    print(
        "Speeds are those of the products of quantized layers; the time to the first "
        "token is not predicted."
    )


def _write(args: argparse.Namespace, result: ResultFile) -> None:
    """Writes the files asked for."""
    output.write_text(args, result_file.text(result))
    if args.csv:
        regular_files.write(args.csv, csv_text(result))


PREDICTED = "Nothing was measured: every time is predicted, for a GPU like this one."
MEASURED = "Medians, and the interquartile range."


def heading(machine: MachineFacts, is_measured: bool) -> str:
    """Returns the machine, and whether anything is measured on it."""
    return (
        f"{machine.chip}, {machine.cores} cores, {machine.system}, MLX {machine.mlx}, "
        f"commit {machine.commit or 'unknown'}\n"
        f"{MEASURED if is_measured else PREDICTED}\n"
    )


def csv_text(result: ResultFile) -> str:
    """Returns the tables of a result as one of CSV, with its date and machine."""
    facts = {"date": result.date, **asdict(result.machine)}
    found = (
        documents.products(result.products),
        documents.generation(result.generation),
        documents.first_tokens(result.first_tokens),
    )
    rows = [
        {"table": table.title, **row, **facts} for table in found for row in table.rows
    ]
    columns = dict.fromkeys(name for row in rows for name in row)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [*columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
