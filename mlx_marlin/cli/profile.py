"""`mlx-marlin profile`: compares products with the limits of a device.

Every line with a time, or with a figure that depends on one, says where the time comes
from: "measured", "predicted" or "assumed".
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_marlin import tables
from mlx_marlin.backends import registry
from mlx_marlin.cli import arguments, documents, output, profiled
from mlx_marlin.cli.pictures import figures
from mlx_marlin.measure.profiling import Profile, Roofline, document
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.products import this_machine
from mlx_marlin.tables import Value

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
        "products", f"default: {profiled.default_set()}"
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
    output.add_json(parser, "--export-json")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="save the roofline with all profiles as .svg or .png",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the profiles; returns 1 if a time cannot be right."""
    _check_arguments(args)
    is_measured = args.chip is None and args.assume_ms is None and profiled.on_gpu()
    device = this_machine.device() if is_measured else arguments.device(args.chip)
    found, skipped = profiled.find(args, device, is_measured)
    profiles = profiled.timed(args, found, device, is_measured)
    exported = document(device, profiles, skipped)
    output.write_json(args, exported)
    if args.plot:
        charts = documents.profile_charts(exported)
        figures.save(args.plot, "--plot", lambda: figures.figure(charts))
    table = documents.profiles(exported)
    shown = [tables.printed(table)]
    if args.single_config:
        rows = zip(profiles, table.rows, exported["profiles"], strict=True)
        shown = ["\n".join(_details(*each)) for each in rows]
    print("\n\n".join([_peaks(device), *shown, *documents.refusals(exported)]))
    for row in skipped:
        print(f"{row.problem.explain()}: no profile of {row.kernel}: {row.reason}")
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
        output.check_file(args.plot, "--plot")
        figures.require("--plot")  # before measuring


WIDTH = 15
"""Width of the names of details."""
OF_PRODUCT = ("rows", "k→n", "format", "dtype", "layout", "low occupancy")
"""Columns of the table that details have in another line."""
SOURCES = {
    "operands": " (bytes, each once)",
    "traffic": " (requested of caches and memory, by the plan)",
    "counts": " (by the emulator)",
    "occupancy": " (predicted)",
}
"""Further figures of a profile, and where they are from."""
REASONS = {
    "MEMORY": ": below the ridge point, the bandwidth is the nearer roof",
    "COMPUTE": ": above the ridge point, the multiplications are the nearer roof",
    "LATENCY": ": less than half of either roof is used",
    "BALANCED": ": within a tenth of the ridge point, both roofs are near",
}


def _peaks(device: PlanningDevice) -> str:
    stock = ""
    if device.stock_tflops != device.tflops:
        stock = f" ({device.stock_tflops:.3g} with tensor units)"
    roofline = Roofline(tflops=device.tflops, bandwidth_gbs=device.bandwidth_gbs)
    return (
        f"{device.variant}: peaks {device.tflops:.2f} TFLOPS{stock} and "
        f"{device.bandwidth_gbs:g} GB/s, ridge point {roofline.ridge:.1f} FLOP/byte"
    )


def _details(
    profile: Profile, row: Mapping[str, Value], exported: Mapping[str, Any]
) -> Iterator[str]:
    """Yields the lines of a profile: the row of its table, and where it is from."""
    yield profile.problem.explain()
    for head, value in {**row, "plan": exported["plan"]}.items():
        if (shown := tables.text(value)) and head not in OF_PRODUCT:
            is_derived = head in tables.FIGURES or head == "bottleneck"
            mark = f" ({profile.origin})" if is_derived else ""
            yield f"{head:<{WIDTH}}{shown}{REASONS.get(shown, '')}{mark}"
    for name, origin in SOURCES.items():
        if exported[name]:
            yield f"{name:<{WIDTH}}{_listed(exported[name])}{origin}"
    if low := (exported["occupancy"] or {}).get("low"):
        yield f"{'':<{WIDTH}}LOW OCCUPANCY: {low} (predicted)"


def _listed(values: Mapping[str, Any]) -> str:
    """Returns figures by their names, without those that are missing."""
    return ", ".join(
        f"{name.replace('_', ' ')} "
        + (f"({_listed(value)})" if isinstance(value, dict) else tables.text(value))
        for name, value in values.items()
        if value and name not in ("limit", "low")
    )
