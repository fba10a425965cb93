"""`mlx-marlin report MODEL`: shows who serves each layer of a model."""

import argparse

from mlx_marlin.cli import arguments, models, output

ROWS = (1, 4, 8)
"""Default rows."""

DESCRIPTION = """
Show who serves each layer of a model, for several numbers of rows: our kernels or stock
MLX, how long it takes, and why not our kernels. The weights are not read.

Times are the cost model's ("predicted"), or those that `mlx-marlin tune` has measured
on this machine ("measured").
"""
EPILOG = """
examples:
  mlx-marlin report mlx-community/Qwen3-4B-4bit
  mlx-marlin report mlx-community/Qwen3-4B-4bit --rows 1,4,8,32 --chip "M3 Max"
  mlx-marlin report my-model --json report.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="name, folder or file of a model, in any format of mlx_marlin.load",
    )
    arguments.add_rows(parser, ROWS)
    arguments.add_chip(parser, "decide")
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the report and returns 0."""
    rows = arguments.numbers(args.rows) if args.rows else ROWS
    if args.chip is not None:
        arguments.device(args.chip)  # before the model is loaded, which takes time
    models.check(args.model)
    from mlx_marlin.lm.report.model_report import report

    model, _ = models.load(args.model, lazy=True)
    found = report(model, rows, chip=args.chip)
    output.write_json(args, found.document())
    print(found)
    return 0
