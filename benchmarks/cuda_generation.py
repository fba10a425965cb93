"""Tokens a second of mlx-lm on a CUDA device, with stock MLX and with our kernels.

The model is a Llama of the 8B shape, affine 4-bit, with random weights, which are drawn
as codes: no float model is made. Prompts are random too. Tokens are the greedy ones,
generated as mlx-lm does: one stream by `generate_step`, several by `BatchGenerator`.
Timed is decoding alone, by the host's clock, after the first two new tokens; the
variants take turns, and the medians count. Random weights make near ties, so equal
tokens are told, not asked for.

Runs on any back end; rates of a CPU say nothing.

Usage: python benchmarks/cuda_generation.py [--smoke] [--json OUT.json]
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from cuda_decoding import (
    LLAMA_8B,
    PREPARED,
    TINY,
    Tokens,
    decode,
    random_model,
    random_prompts,
)
from cuda_report import Progress, heading, machine, table, write_json
from cuda_weights import Format

import mlx_marlin

STREAMS = (1, 4, 8, 16, 32)
PROMPT, NEW, REPEATS = 64, 128, 3
COMPARED = 16
"""Steps whose tokens are compared with stock's."""
TARGET, TARGET_STREAMS = 2.0, 16
"""Times stock's tokens a second that are asked for, and up to how many streams."""

VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "stock": lambda model: model,
    "marlin": lambda model: mlx_marlin.optimize(model, layout="marlin"),
    "joined": lambda model: mlx_marlin.optimize(model, layout="marlin", join=True),
    "traced": lambda model: mlx_marlin.optimize(
        model, layout="marlin", join=True, trace=True
    ),
    "mlx": lambda model: mlx_marlin.optimize(model, layout="mlx"),
}
"""What is done to a model before it is timed: "joined" has q, k, v and gate, up in one
launch each, "traced" also its blocks as traced graphs, "mlx" leaves the weights as MLX
stores them."""
DEFAULT_VARIANTS = ("stock", "marlin", "joined", "traced")


def measure(
    models: dict[str, nn.Module],
    streams: int,
    asked: argparse.Namespace,
    progress: Progress,
) -> dict[str, Any]:
    """Returns the row of the report of some streams."""
    prompts = random_prompts(streams, asked.prompt, asked.sizes["vocab_size"])
    rates: dict[str, list[float]] = {name: [] for name in models}
    tokens: dict[str, Tokens] = {}
    for repeat in range(-1, asked.repeats):  # the first one compiles, allocates
        for name, model in models.items():
            rate, tokens[name] = decode(model, prompts, asked.new)
            progress.step(f"{streams} streams, {name}")
            if repeat >= 0:
                rates[name].append(rate)
    medians = {name: statistics.median(of) for name, of in rates.items()}
    result: dict[str, Any] = {
        "streams": streams,
        "tokens_a_second": medians,
        "range": {name: [min(of), max(of)] for name, of in rates.items()},
    }
    if "stock" in models:
        stock = medians["stock"]
        result["times_stock"] = {name: medians[name] / stock for name in models}
        result["equal_tokens"] = {
            name: equal(tokens[name], tokens["stock"]) for name in models
        }
    return result


def equal(ours: Tokens, stock: Tokens) -> float:
    """Returns the fraction of equal tokens among the first steps."""
    return float(np.mean(np.array(ours[:COMPARED]) == np.array(stock[:COMPARED])))


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", nargs="+", type=int, default=[*STREAMS])
    parser.add_argument("--layers", type=int, help="fewer than the 8B shape's 32")
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=64)
    parser.add_argument(
        "--variants", nargs="+", choices=[*VARIANTS], default=[*DEFAULT_VARIANTS]
    )
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=NEW, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path, metavar="OUT.json")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="stop between numbers of streams before this has passed",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny, to see that it runs"
    )
    asked = parser.parse_args(given)
    asked.sizes = dict(LLAMA_8B)
    if asked.smoke:
        asked.sizes, asked.streams = dict(TINY), [1, 3]
        asked.prompt, asked.new, asked.repeats = 5, 6, 1
    if asked.layers is not None:
        asked.sizes["num_hidden_layers"] = asked.layers
    least = min(*asked.streams, asked.prompt, asked.new - PREPARED, asked.repeats)
    if least < 1 or asked.sizes["num_hidden_layers"] < 1:
        parser.error(f"numbers must be positive, and --new more than {PREPARED}")
    return asked


def lines(report: dict[str, Any], names: Sequence[str]) -> str:
    """Returns the table of tokens a second and what it says of the bound."""
    head = ["streams", *(f"{name} tok/s" for name in names)]
    ours = [name for name in names if name != "stock"] if "stock" in names else []
    head += [f"{name} x stock" for name in ours] + [f"{name} equal" for name in ours]
    rows = []
    for each in report["results"]:
        row = [f"{each['streams']}"]
        row += [f"{each['tokens_a_second'][name]:.1f}" for name in names]
        row += [f"{each['times_stock'][name]:.2f}" for name in ours]
        row += [f"{each['equal_tokens'][name]:.0%}" for name in ours]
        rows.append(row)
    text = [table([head, *rows])]
    for each in report["acceptance"]:
        text.append(
            f"{'pass' if each['passed'] else 'FAIL'}  {each['streams']} streams: "
            f"{each['times_stock']:.2f} x stock by {each['variant']}, "
            f"at least {TARGET:.1f}"
        )
    if not report["complete"]:
        text.append("NOT COMPLETE: the time limit came first")
    return "\n".join(text)


def acceptance(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns whether the best of our variants keeps the bound."""
    judged = []
    for each in results:
        ours = {
            name: times
            for name, times in each.get("times_stock", {}).items()
            if name != "stock"
        }
        if not ours or each["streams"] > TARGET_STREAMS:
            continue
        best = max(ours, key=lambda name: ours[name])
        judged.append(
            {
                "streams": each["streams"],
                "variant": best,
                "times_stock": ours[best],
                "passed": ours[best] >= TARGET,
            }
        )
    return judged


def run(asked: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    started = time.monotonic()
    format = Format("affine", 4, asked.group_size)
    results: list[dict[str, Any]] = []
    report = machine() | {
        "model": asked.sizes,
        "format": str(format),
        "prompt_tokens": asked.prompt,
        "new_tokens": asked.new,
        "repeats": asked.repeats,
        "results": results,
        "acceptance": [],
        "complete": False,
    }
    progress.print(f"{heading(report)}\n{asked.sizes}, {format}")
    models = {}
    for name in asked.variants:
        models[name] = VARIANTS[name](random_model(asked.sizes, format))
        mx.eval(models[name].parameters())
        mx.clear_cache()
        progress.print(f"model {name}: {time.monotonic() - started:.0f} s after start")
    longest = 0.0
    for streams in asked.streams:
        begun = time.monotonic()
        if begun - started + longest > asked.time_limit:
            break  # the next may take as long as the longest
        results.append(measure(models, streams, asked, progress))
        if asked.sizes == LLAMA_8B:
            report["acceptance"] = acceptance(results)
        write_json(asked.json, report)
        rates = results[-1]["tokens_a_second"].items()
        told = ", ".join(f"{name} {rate:.1f}" for name, rate in rates)
        progress.print(f"{streams} streams, tokens a second: {told}")
        longest = max(longest, time.monotonic() - begun)
    report["complete"] = len(results) == len(asked.streams)
    write_json(asked.json, report)
    return report


def main() -> int:
    asked = arguments()
    asked.variants = list(dict.fromkeys(asked.variants))
    runs = len(asked.streams) * len(asked.variants) * (asked.repeats + 1)
    progress = Progress(runs, "run")
    try:
        report = run(asked, progress)
    finally:
        progress.close()
    print(lines(report, asked.variants))
    return 0


if __name__ == "__main__":
    sys.exit(main())
