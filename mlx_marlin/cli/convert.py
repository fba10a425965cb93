"""`mlx-marlin convert`: converts a checkpoint to our packed layout, or to MLX's."""

import argparse
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_marlin import progress, tables
from mlx_marlin.cli import models

if TYPE_CHECKING:
    from mlx_marlin.checkpoints.quantization import Quantization
    from mlx_marlin.lm.checkpoints.conversion import Row

DESCRIPTION = "Convert a checkpoint, one tensor at a time."
EPILOG = """
SRC is a GGUF file, or a folder in the format of MLX, GPTQ, AWQ, AutoRound,
compressed-tensors or ModelOpt, or one with plain weights, or OWNER/NAME of a folder on
the Hugging Face Hub. Quantized weights are moved without rounding; what DST cannot
hold exactly is refused, or its error is in the last column of the table. Weights of
GGUF's types without kernels, such as IQ2_XS, need --requantize. DST appears when it is
complete; a conversion that was interrupted leaves nothing that loads.

examples:
  mlx-marlin convert Qwen3-8B-GPTQ-Int4 qwen3-marlin
  mlx-marlin convert Qwen3-8B qwen3-4bit --layout mlx --bits 4 --quantizer search
  mlx-marlin convert Qwen3-8B-AWQ qwen3-mlx --layout mlx --dry-run
  mlx-marlin convert Qwen3-8B-IQ2_XS.gguf qwen3-4bit --requantize 4
"""
QUANTIZATION = ("bits", "group_size", "mode", "quantizer", "embedding_bits")
"""Options that say how plain weights are quantized."""
FOR_BOTH = ("group_size", "mode", "quantizer")
"""Those of them that say it for weights that are quantized anew, too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "source",
        metavar="SRC",
        help="folder, GGUF file, or name on the Hugging Face Hub",
    )
    parser.add_argument("destination", metavar="DST", type=Path, help="folder to make")
    parser.add_argument(
        "--layout",
        default="marlin",
        help="marlin: packed for our kernels (default); mlx: as mlx_lm.load reads it",
    )
    parser.add_argument(
        "--only",
        metavar="REGEX",
        help="convert only parameters whose name in mlx-lm matches",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the table and write nothing"
    )
    group = parser.add_argument_group(
        "quantization of plain weights",
        "Plain weights stay as they are unless one of these options is given.",
    )
    group.add_argument("--bits", type=int, help="bits of a code (default: the mode's)")
    group.add_argument(
        "--group-size", help="weights that share a scale, or channel for a whole row"
    )
    group.add_argument(
        "--mode",
        help="affine (default), symmetric, zero_point, mxfp4, mxfp8 or nvfp4",
    )
    group.add_argument(
        "--quantizer",
        help="nearest: as mx.quantize (default); search: least squared error",
    )
    group.add_argument(
        "--embedding-bits",
        help="bits of embeddings and the output head, or plain (default: as others)",
    )
    parser.add_argument(
        "--requantize",
        metavar="BITS",
        type=int,
        help="decode weights of a GGUF file whose types have no kernels, and quantize "
        "them anew, as --group-size, --mode and --quantizer say",
    )


def run(args: argparse.Namespace) -> int:
    """Converts, and prints what became of the parameters."""
    requantize, quantization = _requantization(args), _quantization(args)
    import mlx_lm  # noqa: F401  here, because it takes seconds

    from mlx_marlin.lm.checkpoints import conversion, gguf_source

    conversion.check(args.destination, args.layout, args.only)
    source = gguf_source.open_source(models.downloaded(args.source), requantize)
    rows: Any = conversion.convert(
        source,
        args.destination,
        layout=args.layout,
        quantization=quantization,
        only=args.only,
        dry_run=args.dry_run,
    )
    with closing(rows):  # an interrupt between two rows ends the conversion at once
        written = _printed_rows(rows)
    print(_summary(written, args))
    return 0


def _quantization(args: argparse.Namespace) -> "Quantization | None":
    """Returns how to quantize plain weights; None if no option asks for it."""
    asked = {name for name in QUANTIZATION if getattr(args, name) is not None}
    if args.requantize is not None:
        asked -= {*FOR_BOTH}
    return _said(args, args.bits) if asked else None


def _requantization(args: argparse.Namespace) -> "Quantization | None":
    """Returns how to quantize weights anew; None if no option asks for it."""
    return None if args.requantize is None else _said(args, args.requantize)


def _said(args: argparse.Namespace, bits: int | None) -> "Quantization":
    """Returns the quantization of the options, with bits or the mode's own."""
    from mlx_marlin.checkpoints.quantization import Quantization
    from mlx_marlin.weights.formats import CHANNEL, MODE_DEFAULTS

    mode = args.mode or "affine"
    group_size, default_bits = MODE_DEFAULTS.get(mode, MODE_DEFAULTS["affine"])
    if args.group_size == "channel":
        group_size = CHANNEL
    elif args.group_size is not None:
        group_size = _integer("--group-size", args.group_size)
    return Quantization(
        bits=default_bits if bits is None else bits,
        group_size=group_size,
        mode=mode,
        quantizer=args.quantizer or "nearest",
        embedding_bits=_embedding_bits(args.embedding_bits),
    )


def _embedding_bits(text: str | None) -> int | None:
    if text in (None, "plain"):
        return None if text is None else 0
    return _integer("--embedding-bits", text, "plain")


def _integer(name: str, text: str, other: str = "channel") -> int:
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ValueError(f"{name} {text!r}, expected a number or {other}")
    return int(text)


def _printed_rows(rows: "Iterator[Row]") -> "list[Row]":
    """Moves a bar, and then prints a line for equal parameters of all layers."""
    from mlx_marlin.lm.module_tree import common_path, pattern

    written = [*progress.shown(rows, "convert", "parameter")]
    groups: dict[tuple[str, str, bool], list[Row]] = {}
    for row in written:
        key = pattern(row.name), _change(row), row.error > 0
        groups.setdefault(key, []).append(row)
    table: list[dict[str, tables.Value]] = [
        {
            "parameter": common_path([row.name for row in group]),
            "count": len(group),
            "format": change,
            "bytes": f"{sum(row.nbytes for row in group):,}",
            "error": f"{max(row.error for row in group):.2e}" if rounded else "exact",
        }
        for (_, change, rounded), group in groups.items()
    ]
    print(tables.printed(tables.Table(title="", rows=table, usual=["format"])))
    return written


def _change(row: "Row") -> str:
    """Returns the format of a parameter before and after, or once if it stays."""
    stays = row.target.startswith(row.source)
    return row.target if stays else f"{row.source} → {row.target}"


def _summary(rows: "list[Row]", args: argparse.Namespace) -> str:
    total = sum(row.nbytes for row in rows)
    rounded = sum(row.error > 0 for row in rows)
    done = "would take" if args.dry_run else f"in {args.destination} take"
    size = f"{len(rows)} parameters {done} {total:,} bytes; {rounded} of them rounded"
    is_asked = _quantization(args) is not None
    return "\n".join([*_plain(rows, is_asked), size])


def _plain(rows: "list[Row]", is_asked: bool) -> Iterator[str]:
    """Yields lines that say which weights of layers stay plain, and why."""
    if all(row.source == row.target for row in rows):
        options = " or ".join(f"--{name.replace('_', '-')}" for name in QUANTIZATION)
        without = "" if is_asked else f": plain weights stay plain without {options}"
        yield f"nothing was quantized{without}"
    for reason in dict.fromkeys(row.plain_because for row in rows):
        if is_asked and reason:
            own = [row for row in rows if row.plain_because == reason]
            more = f" and {len(own) - 1} more" if len(own) > 1 else ""
            yield (
                f"not quantized: {own[0].name}{more}, {own[0].target}, "
                f"{sum(row.nbytes for row in own):,} bytes: {reason}"
            )
