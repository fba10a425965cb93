"""What our model of the kernels and of stock MLX says about language models.

For each chip and number of rows, the products of one token's pass, summed: stock MLX,
and ours with what the handover leaves to stock. Nothing here was measured on Apple
hardware; docs/stock.md has the error of the stock model on every published row.

Usage: python benchmarks/predicted.py
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from mlx_marlin import scheduler
from mlx_marlin.device import Device
from mlx_marlin.problem import Problem
from mlx_marlin.scheduler.stock import stock_prediction

CHIPS = ("Apple M1 Max", "Apple M3 Max", "Apple M4 Pro", "Apple M4 Max")
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 33, 48, 64, 128, 512)
LEAST = {8: 2.0, 16: 1.7}
"""Times stock's speed that a model's products have to have, by rows."""
MOST_OF_33 = 1.35
"""Times the time of 32 rows that 33 may take; stock takes 1.95."""


@dataclass(frozen=True, slots=True)
class Model:
    """The products of a token's pass: (k, n) and how many of each."""

    name: str
    products: tuple[tuple[int, int, int], ...]


def transformer(
    name: str,
    *,
    hidden: int,
    inner: int,
    layers: int,
    queries: int,
    keys: int,
    vocabulary: int,
) -> Model:
    """Returns a model with gated layers; `queries` and `keys` are features."""
    return Model(
        name,
        (
            (hidden, queries, layers),
            (hidden, keys, 2 * layers),
            (queries, hidden, layers),
            (hidden, inner, 2 * layers),
            (inner, hidden, layers),
            (hidden, vocabulary, 1),
        ),
    )


MODELS = (
    transformer(
        "Llama 8B",
        hidden=4096,
        inner=14336,
        layers=32,
        queries=4096,
        keys=1024,
        vocabulary=128256,
    ),
    transformer(
        "Qwen3 4B",
        hidden=2560,
        inner=9728,
        layers=36,
        queries=4096,
        keys=1024,
        vocabulary=151936,
    ),
    transformer(
        "27B (hidden 5120, inner 17408)",
        hidden=5120,
        inner=17408,
        layers=64,
        queries=5120,
        keys=1024,
        vocabulary=151936,
    ),
)


def served_seconds(problem: Problem, device: Device) -> float:
    """Returns the predicted time of whoever serves a product with a native weight."""
    if scheduler.stock_reason(problem, device):
        return stock_prediction(problem, device).seconds
    plan = scheduler.choose(problem, device)
    return scheduler.predict(plan, device).seconds


def problems(model: Model, rows: int) -> Iterator[tuple[int, Problem]]:
    """Yields the products of a pass, each with how often it occurs."""
    for k, n, count in model.products:
        yield count, Problem(m=rows, n=n, k=k)


def totals(model: Model, rows: int, device: Device) -> tuple[float, float]:
    """Returns the seconds of a pass: stock MLX's, and ours."""
    stock = ours = 0.0
    for count, problem in problems(model, rows):
        stock += count * stock_prediction(problem, device).seconds
        ours += count * served_seconds(problem, device)
    return stock, ours


def slower_products(device: Device) -> list[str]:
    """Returns the products that would be served slower than stock MLX serves them."""
    return [
        f"{rows} rows of {problem.k}→{problem.n} on {device.variant}"
        for model in MODELS
        for rows in ROWS
        for _, problem in problems(model, rows)
        if served_seconds(problem, device)
        > stock_prediction(problem, device).seconds * (1 + 1e-9)
    ]


def failures(device: Device) -> list[str]:
    """Returns what a device misses of the bounds, as sentences."""
    missed = [f"slower than stock MLX: {each}" for each in slower_products(device)]
    for model in MODELS:
        ours = {rows: totals(model, rows, device) for rows in (*LEAST, 32, 33)}
        for rows, least in LEAST.items():
            ratio = ours[rows][0] / ours[rows][1]
            if ratio < least:
                missed.append(f"{model.name}, {rows} rows: {ratio:.2f} < {least}")
        step = ours[33][1] / ours[32][1]
        if step > MOST_OF_33:
            missed.append(f"{model.name}: 33 rows take {step:.2f} times 32")
    return missed


def main() -> int:
    print(
        "Predicted by a model, not measured: ms of a pass's products, stock MLX / ours"
    )
    for chip in CHIPS:
        device = Device.named(chip)
        sample = stock_prediction(Problem(m=8, n=4096, k=4096), device)
        doubt = "" if sample.calibrated else ", uncalibrated"
        print(f"\n{device.variant}{doubt}")
        for model in MODELS:
            print(f"  {model.name}")
            for rows in ROWS:
                stock, ours = totals(model, rows, device)
                print(
                    f"    {rows:4} rows  {stock * 1e3:8.2f} / {ours * 1e3:8.2f}"
                    f"  {stock / ours:5.2f} times"
                )
    missed = [each for chip in CHIPS for each in failures(Device.named(chip))]
    print("\n" + ("\n".join(missed) or "every bound is kept"))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
