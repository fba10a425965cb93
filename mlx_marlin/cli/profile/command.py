"""`mlx-marlin profile`: compares products with the limits of a device."""

import argparse
import sys
from pathlib import Path

from mlx_marlin.backends import registry
from mlx_marlin.cli import arguments, json_output
from mlx_marlin.cli.pictures import figures, files, plots
from mlx_marlin.cli.profile import report, subjects, times
from mlx_marlin.cli.render import profile_document
from mlx_marlin.measure.profiling.document import document
from mlx_marlin.products import this_machine

DESCRIPTION = """
Compare the time of quantized matrix products with the limits of a device: TFLOPS, GB/s,
utilization, bottleneck, the share of the roof that is reached, and occupancy.

On a GPU times are measured. Elsewhere, or for another chip, they are predicted by the
cost model, and every line says so.
"""
EPILOG = """
The exit status is 1 if a time cannot be right, because it exceeds a roof.

examples:
  mlx-marlin profile
  mlx-marlin profile --single-config 1x4096x4096 --bits 3 --all-kernels
  mlx-marlin profile --single-config 8x4096x4096 --mode affine --compare stock
  mlx-marlin profile --model mlx-community/Qwen3-4B-4bit --json profile.json
  mlx-marlin profile --compare stock --plot roofline.svg
  mlx-marlin profile --single-config 1x4096x4096 --chip "M4 Max" --assume-ms 0.042
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    products = parser.add_argument_group(
        "products", f"default: {subjects.default_set()}"
    )
    either = products.add_mutually_exclusive_group()
    either.add_argument(
        "--single-config",
        metavar="MxNxK",
        help="one product y[M, N] = x[M, K] @ W[N, K]^T, in detail; default format: "
        "symmetric, with groups of 128",
    )
    either.add_argument(
        "--model", metavar="NAME", help="the layers of an mlx-lm model, by name or path"
    )
    arguments.add_format(products)
    arguments.add_layout(products)
    kernels = parser.add_argument_group("kernels")
    which = kernels.add_mutually_exclusive_group()
    which.add_argument(
        "--kernel",
        choices=registry.kernels(),
        help="default: the one that is predicted to be the fastest",
    )
    which.add_argument(
        "--all-kernels", action="store_true", help="every kernel that can compute it"
    )
    kernels.add_argument("--compare", choices=("stock",), help="also profile stock MLX")
    arguments.add_chip(parser, "predict")
    parser.add_argument(
        "--assume-ms",
        type=float,
        metavar="T",
        help="milliseconds of the product, instead of measuring or predicting",
    )
    json_output.add_option(parser, "--export-json")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="save the roofline with all profiles as .svg or .png",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the profiles; returns 1 if a time cannot be right."""
    _check_arguments(args)
    is_measured = args.chip is None and args.assume_ms is None and times.on_gpu()
    device = this_machine.device() if is_measured else arguments.device(args.chip)
    why_not = times.why_not_measured if is_measured else None
    found, skipped = subjects.find(args, device, why_not)
    if args.assume_ms is not None:
        profiles = times.assumed(found, device, args.assume_ms / 1e3)
    elif is_measured:
        profiles = times.measured(found, device)
    else:
        # The table has no counts; a document and the details of a product have.
        shows_counts = bool(args.single_config) or args.json is not None
        profiles = times.predicted(found, device, shows_counts)
    exported = document(device, profiles, skipped)
    json_output.write(args, exported)
    if args.plot:
        charts = profile_document.charts(exported)
        figures.save(args.plot, "--plot", lambda: plots.figure(charts))
    if args.single_config:
        print(report.details(device, profiles, exported))
    else:
        print(report.table(device, exported))
    for line in report.skipped(skipped):
        print(line)
    if args.plot:
        print(f"saved {args.plot}")
    return 1 if any(profile.refusal for profile in profiles) else 0


def _check_arguments(args: argparse.Namespace) -> None:
    if args.assume_ms is not None:
        arguments.check_range("--assume-ms", args.assume_ms, 1e-9, sys.float_info.max)
        if not args.single_config or args.all_kernels:
            raise ValueError(
                f"--assume-ms {args.assume_ms:g} is the time of one product: expected "
                f"--single-config, and no --all-kernels"
            )
    if args.plot:
        files.check(args.plot, "--plot")
        figures.require("--plot")  # before measuring
