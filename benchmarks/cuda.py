"""Products on a CUDA device: ours, stock MLX, a float16 matmul, the bandwidth's floor.

Each product of ours is compared with float64 on exactly decoded weights, all rows of
256 random columns, before it is timed. Each is timed in two ways, both by the host's
clock, medians, and divided by the number of products, and each with a graph that 30
calls build and with one that was traced before (`mx.compile`), as those of a model are
that `optimize` has traced:

eval    30 products in one `mx.eval` that is waited for, building their graph included,
        which is told apart. What is asked for is judged by it.
stream  the same evaluations by `mx.async_eval`, one after the other, waiting for the
        last only: host and GPU overlap, as in decoding.

Each product has another copy of the weight, so that none is read from cache, and none
waits for another, so MLX may overlap those of an evaluation. Ours, stock MLX and the
matmul take turns. The floor is the bytes of codes, scales, biases, x and y by the
bandwidth of negating an array of 1 GiB, read and written, which is timed first.

All kernels are compiled before, by several processes. A line is printed, and the JSON
written, after each product. Runs on any back end; times of a CPU say nothing. Exits 1
if a product of ours is wrong.

Usage: python benchmarks/cuda.py [--quick | --smoke] [--json OUT.json]
"""

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
from cuda_compiling import compile_ahead
from cuda_instances import needed
from cuda_products import Oracle, Shape, Weights, checked, timed
from cuda_report import Laps, Progress, heading, machine, write_json
from cuda_summary import (
    NOISE,
    TARGET_FORMAT,
    Results,
    acceptance,
    line,
    named,
    summary,
    title,
)
from cuda_timing import Clock, measured_bandwidth
from cuda_weights import Format

MODELS: dict[str, tuple[Shape, ...]] = {
    "llama-8b": ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096)),
    "qwen3-4b": ((2560, 4096), (2560, 1024), (4096, 2560), (2560, 9728), (9728, 2560)),
    "qwen-27b": ((5120, 17408), (17408, 5120)),
    "llama-70b": ((8192, 28672), (28672, 8192), (8192, 8192)),
}
"""Linear layers of common models; the 4096→4096 beside Marlin's is Llama-8B's."""
ROWS = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64, 128)
QUICK_SHAPES = ((4096, 4096), (5120, 17408), (8192, 28672))
QUICK_ROWS = (1, 8, 16, 32, 64)
SMOKE_SHAPES = ((256, 96), (128, 64))
SMOKE_ROWS = (1, 3)
PRODUCTS = 30
"""Products an eval, as in the times of Marlin that docs/lab has."""
REPEATS, STREAMS, EVALS = 7, 5, 5
"""Times that a product is timed by "eval" and by "stream", evaluations of a stream."""
ROTATED = 240 << 20
"""Bytes of other weights between two uses of one: four times an H200's second-level
cache and more, as caches do not always drop what is oldest."""
COPIED = 1 << 30


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=shapes,
        metavar="SHAPE",
        help=f"such as 4096x14336, k then n, or a model: {', '.join(MODELS)}",
    )
    parser.add_argument("--rows", nargs="+", type=positive)
    parser.add_argument(
        "--formats",
        nargs="+",
        type=format_named,
        default=[TARGET_FORMAT],
        metavar="FORMAT",
        help="affine4g128 (the default), affine8g64, symmetric4g128, mxfp4, nvfp4 and "
        "so on; :bfloat16 after it for bfloat16 activations",
    )
    parser.add_argument("--layout", choices=("marlin", "mlx"), default="marlin")
    parser.add_argument("--repeats", type=positive, default=REPEATS)
    parser.add_argument("--products", type=positive, default=PRODUCTS, help="an eval")
    parser.add_argument("--json", type=Path, metavar="OUT.json")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="stop between products before this has passed",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="3 shapes, 5 row counts")
    size.add_argument("--smoke", action="store_true", help="tiny, to see that it runs")
    asked = parser.parse_args(given)
    if asked.layout == "mlx" and any(f.mode == "symmetric" for f in asked.formats):
        parser.error("--layout mlx has no symmetric weights: they are packed only")
    return with_defaults(asked)


def with_defaults(asked: argparse.Namespace) -> argparse.Namespace:
    every = tuple(dict.fromkeys(shape for model in MODELS.values() for shape in model))
    default_shapes: tuple[Shape, ...] = every
    default_rows: tuple[int, ...] = ROWS
    if asked.quick:
        default_shapes, default_rows = QUICK_SHAPES, QUICK_ROWS
    if asked.smoke:
        default_shapes, default_rows = SMOKE_SHAPES, SMOKE_ROWS
        asked.repeats, asked.products = 2, 2
    given = [shape for shapes in asked.shapes or () for shape in shapes]
    asked.shapes = list(dict.fromkeys(given)) or [*default_shapes]
    asked.rows = sorted(set(asked.rows or default_rows))
    asked.rotated, asked.copied = (1, 1 << 20) if asked.smoke else (ROTATED, COPIED)
    streams, evals = (1, 2) if asked.smoke else (STREAMS, EVALS)
    asked.clock = Clock(asked.products, asked.repeats, streams, evals)
    return asked


def shapes(text: str) -> tuple[Shape, ...]:
    """Reads "4096x14336", "4096→14336" or a model's name."""
    if text in MODELS:
        return MODELS[text]
    match = re.fullmatch(r"(\d+)(?:x|→)(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither like 4096x14336 nor one of {', '.join(MODELS)}"
        )
    return ((int(match[1]), int(match[2])),)


def format_named(text: str) -> Format:
    try:
        return Format.parse(text)
    except ValueError as wrong:  # argparse keeps its text to itself
        raise argparse.ArgumentTypeError(str(wrong)) from None


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def measure_shape(
    shape: Shape,
    format: Format,
    asked: argparse.Namespace,
    bandwidth: float,
    laps: Laps,
) -> Iterator[dict[str, Any]]:
    """Yields the rows of the report of one shape; its weights are drawn once."""
    mx.random.seed(0)
    with laps("drawing"):
        weights = Weights(shape, format, asked.layout, asked.rotated)
        every = mx.random.normal((asked.rows[-1], shape[0])).astype(format.type)
        oracle = Oracle(every, weights)
    for rows in asked.rows:
        x = mx.array(every[:rows])
        mx.eval(x)
        with laps("checking"):
            result = checked(weights, x, oracle)
        with laps("timing"):
            result |= timed(weights, x, result, asked.clock, bandwidth)
        yield result


def run(asked: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    laps = Laps()
    results: Results = []
    report = machine() | {
        "bandwidth_gb_s": None,
        "bandwidth_how": f"negating {asked.copied} bytes of float16, read and written",
        "products_an_eval": asked.products,
        "repeats": asked.repeats,
        "streams": asked.clock.streams,
        "evals_a_stream": asked.clock.evals,
        "noise": NOISE,
        "seconds": laps.seconds,
        "results": results,
        "acceptance": [],
        "complete": False,
    }
    progress.print(heading(report))
    with laps("compiling"):
        ahead = needed(asked.formats, asked.shapes, asked.rows, asked.layout)
        compile_ahead(ahead, progress.print)
    with laps("bandwidth"):
        bandwidth = measured_bandwidth(asked.copied, asked.repeats)
        mx.clear_cache()  # of copies
    report["bandwidth_gb_s"] = bandwidth / 1e3
    progress.print(f"bandwidth {bandwidth / 1e3:.0f} GB/s")
    write_json(asked.json, report)
    longest = 0.0
    for format, shape in product(asked.formats, asked.shapes):
        begun = laps.total()
        if begun + longest > asked.time_limit:
            return report  # the next product may take as long as the longest
        progress.print(title(shape, format, asked.layout))
        for result in measure_shape(shape, format, asked, bandwidth, laps):
            results.append(result)
            report["acceptance"] = acceptance(results)
            write_json(asked.json, report)
            progress.step(named(result), line(result))
            longest = max(longest, laps.total() - begun)
            begun = laps.total()
            if begun + longest > asked.time_limit:
                break
        mx.clear_cache()
        progress.print(laps.told())
    report["complete"] = len(results) == products(asked)
    write_json(asked.json, report)
    return report


def products(asked: argparse.Namespace) -> int:
    return len(asked.formats) * len(asked.shapes) * len(asked.rows)


def main() -> int:
    asked = arguments()
    progress = Progress(products(asked), "product")
    try:
        report = run(asked, progress)
    finally:
        progress.close()
    print(summary(report))
    return int(any(each["wrong"] is not None for each in report["results"]))


if __name__ == "__main__":
    sys.exit(main())
