"""`mlx-marlin report MODEL`: shows who serves each layer of a model."""

import argparse
import json
from pathlib import Path

from mlx_marlin.cli import models

ROWS = (1, 4, 8)
"""Default rows."""

DESCRIPTION = """
Show who serves each layer of a model, for several numbers of rows: our kernels or stock
MLX, how long it takes, and why not our kernels. The weights are not read.

Times are the cost model's ("predicted"), or those that `mlx-marlin tune` has measured
on this machine ("tuned").
"""
EPILOG = """
examples:
  mlx-marlin report mlx-community/Qwen3-4B-4bit
  mlx-marlin report mlx-community/Qwen3-4B-4bit --rows 1,4,8,32 --chip "M3 Max"
  mlx-marlin report my-model --json report.json
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Adds the arguments of the command."""
    parser = subparsers.add_parser(
        "report",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="name, folder or file of a model, in any format of mlx_marlin.load",
    )
    parser.add_argument(
        "--rows",
        default=models.listed(ROWS),
        help=f"rows of the activations; default: {models.listed(ROWS)}",
    )
    parser.add_argument(
        "--chip",
        metavar="NAME",
        help='decide for a chip such as "M3 Max" or "H200"; default: what this machine '
        "does",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the report as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the report and returns 0."""
    from mlx_marlin.integrations.mlx_lm.report.model_report import check, report

    rows = models.rows(args.rows)
    check(rows, args.chip)  # before the model is loaded, which takes time
    path = args.json
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"--json {path}: expected a file in an existing folder")
    model, _ = models.load(args.model, lazy=True)
    found = report(model, rows, chip=args.chip)
    if path is not None:
        path.write_text(f"{json.dumps(found.document(), indent=2)}\n", "utf-8")
    print(found)
    return 0
