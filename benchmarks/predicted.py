"""What our model of the kernels and of stock MLX says about language models.

For each chip and number of rows, the products of one token's pass, summed: stock MLX,
and ours with what the handover leaves to stock. Times are those of a chain, in which
each product waits for the one before it. Nothing here was measured on Apple hardware;
docs/stock_model.md has the stock model's errors on published times.

Of a mixture of experts the rows choose theirs alike and independently, so that r rows
with c choices among e experts hit e * (1 - (1 - 1/e)^(r * c)) of them. Ours reads each
of these once for a tile of rows; how many rows an expert has is binomial, and few of
them are priced as dot products. Stock MLX is taken to read one from memory for every
choice; the second ratio is what would be left if caches served every repeated expert.

Usage: python -m benchmarks.predicted
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.stock import experts as stock_experts
from benchmarks.stock.prediction import stock_prediction
from mlx_marlin.backends import planner
from mlx_marlin.backends.metal import backend
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts import gather_seconds
from mlx_marlin.backends.metal.main_loop import memory_seconds
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import Problem, problem_of

CHIPS = ("Apple M1 Max", "Apple M3 Max", "Apple M4 Pro", "Apple M4 Max")
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 33, 48, 64, 128, 512)
LEAST = {8: 1.85, 16: 1.65}
"""Times stock's speed that a model's products have to have, by rows."""
MOST_OF_33 = 1.5
"""Times the time of 32 rows that 33 may take; stock, which serves 32, takes 1.95."""
LEAST_OF_EXPERTS = {8: 1.15, 16: 1.5, 32: 1.8}
"""As `LEAST`, of a mixture of experts."""
SORTED_FROM = 64
"""Choices from which mlx-lm sorts them by expert."""

Products = tuple[tuple[int, int, int], ...]
"""(k, n) and how many of each."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The products of a mixture of experts in a token's pass.

    Attributes:
        count: Experts of a layer.
        chosen: Experts that a row chooses.
        products: Of one expert, and in how many layers.
    """

    count: int
    chosen: int
    products: Products


@dataclass(frozen=True, slots=True)
class Model:
    """The products of a token's pass, those of experts by themselves."""

    name: str
    products: Products
    experts: Experts | None = None


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


MIXTURE = Model(
    "Qwen3 30B-A3B, 8 of 128 experts",
    (
        (2048, 4096, 48),
        (2048, 512, 2 * 48),
        (4096, 2048, 48),
        (2048, 151936, 1),
    ),
    Experts(count=128, chosen=8, products=((2048, 768, 2 * 48), (768, 2048, 48))),
)
"""Its router, not quantized everywhere, is left out."""


def served_seconds(problem: Problem, device: Device) -> float:
    """Returns the predicted time of whoever serves a product with a native weight."""
    if backend.handover(problem, device):
        return stock_prediction(problem, device).seconds
    plan = planner.choose(problem, device)
    return planner.predict(plan, device).seconds


def problems(
    model: Model, rows: int, mode: str = "affine"
) -> Iterator[tuple[int, Problem]]:
    """Yields the products of a pass, each with how often it occurs."""
    for k, n, count in model.products:
        yield count, problem_of(rows, n, k, mode=mode)


def totals(model: Model, rows: int, device: Device) -> tuple[float, float]:
    """Returns the seconds of a pass: stock MLX's, and ours."""
    stock = ours = 0.0
    for count, problem in problems(model, rows):
        stock += count * stock_prediction(problem, device).seconds
        ours += count * served_seconds(problem, device)
    if model.experts:
        for theirs, served, _ in expert_seconds(model.experts, rows, device):
            stock += theirs
            ours += served
    return stock, ours


def expert_seconds(
    experts: Experts, rows: int, device: Device
) -> Iterator[tuple[float, float, float]]:
    """Yields, for each product of all layers' experts: seconds of stock MLX, of
    whoever serves it, and of stock MLX if its caches served every repeated expert."""
    pairs = rows * experts.chosen
    is_sorted = pairs >= SORTED_FROM
    for k, n, layers in experts.products:
        problem = Problem(m=pairs, n=n, k=k)
        gather = GatherProblem(
            problem=problem, experts=experts.count, is_sorted=is_sorted
        )
        stock = stock_experts.stock_seconds(gather, device)
        stays = backend.reason_of_experts(gather, device) is not None
        served = stock if stays else gather_seconds(gather, device)
        once = gather.chosen_experts * problem.weight_bytes
        cached = memory_seconds(round(once), device)
        yield layers * stock, layers * served, layers * min(stock, cached)


def cached_ratio(model: Model, rows: int, device: Device) -> float:
    """Returns the times stock's speed if caches served stock every repeated expert.

    Products that are left to stock MLX are as fast as it either way.
    """
    stock, ours = totals(model, rows, device)
    if model.experts:
        for theirs, served, cached in expert_seconds(model.experts, rows, device):
            stock += cached - theirs
            ours += (cached - served) * (served == theirs)
    return stock / ours


def slower_products(
    device: Device, rows: Iterable[int] = ROWS, mode: str = "affine"
) -> list[str]:
    """Returns the products that would be served slower than stock MLX serves them."""
    sizes = {product[:2] for model in (*MODELS, MIXTURE) for product in model.products}
    return [
        f"{problem.explain()} on {device.variant}"
        for m in rows
        for k, n in sorted(sizes)
        for problem in (problem_of(m, n, k, mode=mode),)
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
    return missed + below(LEAST_OF_EXPERTS, device)


def below(bounds: dict[int, float], device: Device) -> list[str]:
    """Returns where the mixture of experts stays below bounds, as sentences."""
    found = []
    for rows, least in bounds.items():
        stock, ours = totals(MIXTURE, rows, device)
        if stock / ours < least:
            name = f"{MIXTURE.name}, {device.variant}"
            found.append(f"{name}, {rows} rows: {stock / ours:.2f} < {least}")
    return found


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
        print(f"  {MIXTURE.name}")
        for rows in LEAST_OF_EXPERTS:
            stock, ours = totals(MIXTURE, rows, device)
            print(
                f"    {rows:4} rows  {stock * 1e3:8.2f} / {ours * 1e3:8.2f}"
                f"  {stock / ours:5.2f} times, "
                f"{cached_ratio(MIXTURE, rows, device):.2f} if caches served repeats"
            )
    missed = [each for chip in CHIPS for each in failures(Device.named(chip))]
    print("\n" + ("\n".join(missed) or "every bound is kept"))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
