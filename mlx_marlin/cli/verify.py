"""`mlx-marlin verify`: compares a model's layers with float64 and with its source."""

import argparse
import math
from pathlib import Path
from typing import Any

from mlx_marlin import regular_files
from mlx_marlin.checkpoints.location import check_location
from mlx_marlin.cli import arguments, output

DESCRIPTION = "Compare a model's quantized layers with exact results."
EPILOG = """
MODEL is a checkpoint that mlx_marlin.load reads: a GGUF file, or a folder in the format
of mlx-marlin convert, MLX, GPTQ, AWQ or compressed-tensors. Its layers are converted as
mlx_marlin.optimize does. Each is compared with the product of its decoded weights in
float64, and with the weights of SOURCE. The exit status is 1 if a layer is above a
limit or has no weight in SOURCE.

examples:
  mlx-marlin verify qwen3-packed
  mlx-marlin verify qwen3-packed --against Qwen3-8B-GPTQ-Int4 --text sample.txt
  mlx-marlin verify qwen3-4bit --against Qwen3-8B --apply --json report.json
"""
ROWS = [1, 8, 32]
"""Rows of activations: those of decoding, of small batches and of short prompts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("model", metavar="MODEL", help="folder or GGUF file")
    parser.add_argument(
        "--against",
        metavar="SOURCE",
        help="checkpoint that MODEL was made from, plain or quantized",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=Path,
        help="text whose activations are used too, and whose perplexity is computed",
    )
    parser.add_argument(
        "--apply",
        action="store_true",
        help="record in MODEL/config.json that layers above a limit stay on stock MLX",
    )
    arguments.add_rows(parser, ROWS)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of random activations (default: 0)"
    )
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Verifies a model and prints a line for each layer."""
    rows = arguments.numbers(args.rows) if args.rows else ROWS
    for name in filter(None, (args.model, args.against)):
        check_location(Path(name))
    text = None if args.text is None else regular_files.read_text(args.text)
    import mlx_lm  # noqa: F401  here, because it takes seconds

    from mlx_marlin.lm.verification import gate

    gate.check(args.model, text, None, rows, args.seed, args.apply)
    output.print_note(f"loading {args.model}")
    report = gate.verify(
        args.model,
        args.against,
        text=text,
        rows=rows,
        seed=args.seed,
        apply=args.apply,
        progress=True,
    )
    print(report)
    output.write_json(args, _finite(report.as_dict()))
    return 0 if report.passed else 1


def _finite(value: Any) -> Any:
    """Returns a value for JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    is_number = not isinstance(value, float) or math.isfinite(value)
    return value if is_number else None
