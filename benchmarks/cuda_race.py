"""The race that `optimize` runs, on this machine's GPU, with a model of the 8B shape.

Prints the seconds of `optimize` without the race, with it, and at the next load; who
serves which rows; and the tokens a second with stock MLX and with our kernels.

Usage: python benchmarks/cuda_race.py [--model NAME] [--smoke]
"""

import statistics
import time
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
from cuda_models import asked_sizes, quantized_model
from cuda_weights import Format

import mlx_marlin
from mlx_marlin import state
from mlx_marlin.backends import measured_results, result_files, selection
from mlx_marlin.lm.generation import decode, random_prompts
from mlx_marlin.products import this_machine

STREAMS = (1, 4, 8, 16)
PROMPT, NEW, REPEATS = 64, 64, 3
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)


def timed_optimize(model: nn.Module, name: str, **options: object) -> None:
    """Optimizes a model and prints how long it took."""
    state.reset()
    started = time.perf_counter()
    mlx_marlin.optimize(model, **options)  # type: ignore[call-overload]
    mx.eval(model.parameters())
    print(f"optimize, {name}: {time.perf_counter() - started:.1f} s", flush=True)


def rates(model: nn.Module, vocabulary: int) -> dict[int, float]:
    """Returns the tokens a second by the number of streams."""
    found = {}
    for count in STREAMS:
        prompts = random_prompts(count, PROMPT, vocabulary)
        decode(model, prompts, 8)
        runs = [decode(model, prompts, NEW).rate for _ in range(REPEATS)]
        found[count] = statistics.median(runs)
    return found


def print_verdicts() -> None:
    """Prints the results of products, and the times of forward passes."""
    device, backend = this_machine.device(), selection.backend()
    machine = measured_results.machine(device, backend)
    stored = result_files.read(result_files.folder(), machine)
    for result in stored.results.values():
        times = ", ".join(f"{us:.1f} {name}" for name, us in result.medians_us.items())
        served = "stock" if result.stock else "ours"
        print(f"{served}{' (live)' * result.live}: {result.problem}: {times}")
    print(Counter(result.stock for result in stored.results.values()))
    for forwards in stored.forwards.values():
        print(f"forward passes, layout {forwards.layout}:")
        for rows, (stock, ours) in sorted(forwards.seconds.items()):
            print(f"{rows:3} rows: stock {stock * 1e3:.2f} ms, ours {ours * 1e3:.2f}")


def main() -> None:
    """Runs the benchmark."""
    sizes = asked_sizes(__doc__)
    vocabulary = sizes["vocab_size"]
    format = Format(mode="affine", bits=4, group_size=64)

    def load() -> nn.Module:
        model = quantized_model(sizes, format)
        mx.eval(model.parameters())
        return model

    print(mx.device_info().get("device_name"), flush=True)
    model = load()
    stock = rates(model, vocabulary)
    for name in ("the first in a process", "again"):
        timed_optimize(model, f"without the race, {name}", measure=False)
        mlx_marlin.restore(model)
    timed_optimize(model, "with the race")
    print_verdicts()
    mlx_marlin.restore(model)
    timed_optimize(model, "at the next load")
    print(mlx_marlin.report(model, ROWS).summary())
    for count, ours in rates(model, vocabulary).items():
        print(
            f"{count:2} streams: stock {stock[count]:.1f} tokens/s, ours {ours:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
