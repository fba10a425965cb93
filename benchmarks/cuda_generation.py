"""Tokens a second of mlx-lm on a CUDA device, with stock MLX and with our kernels.

The model is a Llama of the 8B shape, or another that is asked for, affine 4-bit, with
random weights, which are drawn as codes: no float model is made. Prompts are random
too. Tokens are the greedy ones, generated as mlx-lm does: one stream by
`generate_step`, several by `BatchGenerator`. Timed is decoding alone, by the host's
clock, after the first two new tokens; the variants take turns, and the medians count.
Random weights make near ties, so equal tokens are told, not asked for.

All kernels are compiled before, in several processes, by generating a few tokens with
one layer of zeros for every variant and number of streams; a few tokens of the whole
model go before those that count. Variants share the arrays that they do not change. A
line is printed, and the JSON written, after each number of streams.

Runs on any back end; rates of a CPU say nothing.

Usage: python benchmarks/cuda_generation.py [--model NAME] [--smoke] [--json OUT.json]
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from cuda_compiling import Task, compile_ahead
from cuda_models import (
    LLAMA_8B,
    MODELS,
    Sizes,
    of_same_arrays,
    quantized_model,
    tiny,
)
from cuda_report import (
    Laps,
    Progress,
    heading,
    host_milliseconds,
    machine,
    table,
    write_json,
)
from cuda_weights import Format, zero_native

import mlx_marlin
from mlx_marlin.backends import selection
from mlx_marlin.lm.generation import (
    PREPARED,
    Tokens,
    decode,
    random_prompts,
)

STREAMS = (1, 4, 8, 16, 32)
PROMPT, NEW, REPEATS = 64, 64, 3
WARM = PREPARED + 6
"""New tokens of a run that does not count: memory is asked for, the clock goes up."""
WORKERS = 8
"""Processes that compile: each has an output head, and while it packs it, 8 GB."""
COMPARED = 16
"""Steps whose tokens are compared with stock's."""
TARGET, TARGET_STREAMS = 2.0, 16
"""Times stock's tokens a second that are asked for, and up to how many streams."""

VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "stock": lambda model: model,
    "marlin": lambda model: mlx_marlin.optimize(
        model, measure=False, layout="marlin", join=False, trace=False
    ),
    "joined": lambda model: mlx_marlin.optimize(
        model, measure=False, layout="marlin", join=True, trace=False
    ),
    "traced": lambda model: mlx_marlin.optimize(
        model, measure=False, layout="marlin", join=True, trace=True
    ),
    "mlx": lambda model: mlx_marlin.optimize(
        model, measure=False, layout="mlx", join=False, trace=False
    ),
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
    host: list[float] = []
    for model in models.values():
        decode(model, prompts, WARM)
    for _ in range(asked.repeats):
        for name, model in models.items():
            host.append(host_milliseconds())
            decoded = decode(model, prompts, asked.new)
            tokens[name] = decoded.tokens
            progress.step(f"{streams} streams, {name}")
            rates[name].append(decoded.rate)
    medians = {name: statistics.median(of) for name, of in rates.items()}
    result: dict[str, Any] = {
        "streams": streams,
        "tokens_a_second": medians,
        "range": {name: [min(of), max(of)] for name, of in rates.items()},
        "host_ms": [min(host), max(host)],
    }
    if "stock" in models:
        stock = medians["stock"]
        result["times_stock"] = {name: medians[name] / stock for name in models}
        result["equal_tokens"] = {
            name: equal(tokens[name], tokens["stock"]) for name in models
        }
    return result


def told(result: dict[str, Any]) -> str:
    """Returns one line on some streams."""
    ratios = result.get("times_stock", {})
    parts = [
        f"{name} {rate:.1f}" + (f" ({ratios[name]:.2f} x stock)" if ratios else "")
        for name, rate in result["tokens_a_second"].items()
    ]
    least, most = result["host_ms"]
    return (
        f"{result['streams']} streams, tokens a second: {', '.join(parts)}; the host "
        f"took {least:.0f} to {most:.0f} ms for a million turns of an empty loop"
    )


def generate_once(
    name: str, sizes: Sizes, format: Format, prompt: int, streams: int
) -> None:
    """Generates with layers of zeros what compiles the kernels of all layers."""
    # Two, because gpt-oss has a window in every other layer.
    model = quantized_model(sizes | {"num_hidden_layers": 2}, format, zero_native)
    prompts = random_prompts(streams, prompt, sizes["vocab_size"])
    decode(VARIANTS[name](model), prompts, WARM)


def to_compile(asked: argparse.Namespace, format: Format) -> list[Task]:
    """Returns what compiles the kernels of a run; nothing without a CUDA device."""
    if selection.backend() != "cuda":
        return []
    return [
        partial(generate_once, name, asked.sizes, format, asked.prompt, streams)
        for streams in sorted(asked.streams, reverse=True)
        for name in asked.variants
    ]


def built(asked: argparse.Namespace, format: Format) -> Iterator[tuple[str, nn.Module]]:
    """Yields the variants of one model, which share what they do not change."""
    drawn = quantized_model(asked.sizes, format)
    for name in asked.variants:
        model = VARIANTS[name](of_same_arrays(drawn, asked.sizes, format))
        mx.eval(model.parameters())
        mx.clear_cache()
        yield name, model


def equal(ours: Tokens, stock: Tokens) -> float:
    """Returns the fraction of equal tokens among the first steps."""
    return float(np.mean(np.array(ours[:COMPARED]) == np.array(stock[:COMPARED])))


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", nargs="+", type=int, default=[*STREAMS])
    parser.add_argument("--model", choices=[*MODELS], default="llama-8b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
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
    asked.sizes = dict(MODELS[asked.model])
    if asked.smoke:
        asked.sizes, asked.streams = tiny(asked.sizes), [1, 3]
        asked.prompt, asked.new, asked.repeats = 5, 6, 1
    if asked.layers is not None:
        asked.sizes["num_hidden_layers"] = asked.layers
    least = min(*asked.streams, asked.prompt, asked.new - PREPARED, asked.repeats)
    if least < 1 or asked.sizes["num_hidden_layers"] < 1:
        parser.error(f"numbers must be positive, and --new more than {PREPARED}")
    return asked


def lines(report: dict[str, Any], names: Sequence[str]) -> str:
    """Returns the table of tokens a second and what it says of the bound."""
    head = ["streams", "host ms", *(f"{name} tok/s" for name in names)]
    ours = [name for name in names if name != "stock"] if "stock" in names else []
    head += [f"{name} x stock" for name in ours] + [f"{name} equal" for name in ours]
    rows = []
    for each in report["results"]:
        row = [f"{each['streams']}", "{:.0f} to {:.0f}".format(*each["host_ms"])]
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
    laps = Laps()
    format = Format("affine", 4, asked.group_size)
    results: list[dict[str, Any]] = []
    report = machine() | {
        "model": asked.sizes,
        "format": str(format),
        "prompt_tokens": asked.prompt,
        "new_tokens": asked.new,
        "repeats": asked.repeats,
        "seconds": laps.seconds,
        "results": results,
        "acceptance": [],
        "complete": False,
    }
    progress.print(f"{heading(report)}\n{asked.sizes}, {format}")
    with laps("compiling"):
        compile_ahead(to_compile(asked, format), progress.print, WORKERS)
    with laps("building"):
        models = dict(built(asked, format))
    progress.print(laps.told())
    longest = 0.0
    for streams in asked.streams:
        begun = laps.total()
        if begun + longest > asked.time_limit:
            break  # the next may take as long as the longest
        with laps("generating"):
            results.append(measure(models, streams, asked, progress))
        if asked.sizes == LLAMA_8B:
            report["acceptance"] = acceptance(results)
        write_json(asked.json, report)
        progress.print(told(results[-1]))
        longest = max(longest, laps.total() - begun)
    progress.print(laps.told())
    report["complete"] = len(results) == len(asked.streams)
    write_json(asked.json, report)
    return report


def main() -> int:
    asked = arguments()
    asked.variants = list(dict.fromkeys(asked.variants))
    runs = len(asked.streams) * len(asked.variants) * asked.repeats
    progress = Progress(runs, "run")
    try:
        report = run(asked, progress)
    finally:
        progress.close()
    print(lines(report, asked.variants))
    return 0


if __name__ == "__main__":
    sys.exit(main())
