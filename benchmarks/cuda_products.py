"""Checks and times one product: ours, stock MLX's and a float16 matmul.

Correctness first: ours is compared with float64 on exactly decoded weights before it is
timed. Times are the host's clock of products in one `mx.eval`, divided by their number;
what of it is building the graph is told apart.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
from cuda_weights import (
    SPREAD,
    Format,
    Native,
    biases_of_stock,
    decoded,
    exact,
    random_native,
)

import mlx_marlin
from mlx_marlin import launch
from mlx_marlin.measurement import label

Shape = tuple[int, int]
"""k, n."""
Call = Callable[[], mx.array]

TOLERANCES = {"float16": 1e-3, "bfloat16": 6e-3}
"""Most relative Frobenius error against exactly decoded weights in float64."""
CHECKED_COLUMNS = 256
WARM_UPS, WARM_SECONDS = 2, 0.1
"""Least rounds and time before those that count: an idle chip clocks low."""


@dataclass(frozen=True)
class Time:
    """Microseconds of a call, its share of an eval of several.

    Attributes:
        whole: From before its graph is built to when it has run.
        build: Of these, building the graph, before MLX starts anything.
    """

    whole: float
    build: float


def time_of(call: Call, calls: int) -> Time:
    mx.synchronize()
    start = time.perf_counter()
    graph = [call() for _ in range(calls)]
    built = time.perf_counter()
    mx.eval(graph)
    mx.synchronize()
    end = time.perf_counter()
    return Time(*((until - start) / calls * 1e6 for until in (end, built)))


def times_of(
    calls: dict[str, Call], repeats: int, products: int
) -> dict[str, list[Time]]:
    """Returns the times of calls that take turns."""
    times: dict[str, list[Time]] = {name: [] for name in calls}
    warm, started = 0, time.monotonic()
    while warm < WARM_UPS or time.monotonic() - started < WARM_SECONDS:
        for call in calls.values():
            time_of(call, products)
        warm += 1
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(time_of(call, products))
    return times


def measured_bandwidth(nbytes: int, repeats: int) -> float:
    """Returns the bytes a microsecond that negating a large array reads and writes."""
    array = mx.zeros(nbytes // 2, mx.float16)
    mx.eval(array)
    times = times_of({"copy": lambda: -array}, repeats, 4)["copy"]
    return 2 * array.nbytes / statistics.median(each.whole for each in times)


class Weights:
    """Copies of one shape's weights, drawn once and handed out in turn.

    Args:
        shape: k and n.
        format: How the weights are quantized.
        layout: "marlin", packed, or "mlx".
        rotated: Bytes of other copies that pass between two uses of one.
    """

    def __init__(self, shape: Shape, format: Format, layout: str, rotated: int) -> None:
        self.k, self.n = shape
        self.format, self.layout = format, layout
        self.native = [random_native(format, self.n, self.k)]
        self.nbytes = sum(each.nbytes for each in self.native[0] if each is not None)
        for _ in range(-(-rotated // self.nbytes)):
            self.native.append(random_native(format, self.n, self.k))
        self.ours = [self._ours(each) for each in self.native]
        self.stock = [
            (*each[:2], biases_of_stock(format, each)) for each in self.native
        ]
        self.floats = [
            mx.random.normal((self.n, self.k), mx.float16, scale=SPREAD)
            for _ in range(1 + -(-rotated // (2 * self.n * self.k)))
        ]
        for copies in (self.stock, self.floats):
            for each in copies:
                mx.eval(each)  # one at a time: drawing takes several times the memory

    def _ours(self, native: Native) -> tuple[Any, ...]:
        if self.layout == "mlx":
            return native
        packed = mlx_marlin.pack(*native, **self.options(self.format.mode))
        mx.eval(packed.words, packed.scales)
        return (packed,)

    def options(self, mode: str) -> dict[str, Any]:
        format = self.format
        return {"group_size": format.group_size, "bits": format.bits, "mode": mode}

    def calls(self, x: mx.array) -> dict[str, Call]:
        """Returns what is compared; each call takes the next copy of the weight."""
        options = self.options(self.format.mode)
        of_stock = self.options(self.format.of_stock)
        wide, turns = x.astype(mx.float16), [count() for _ in range(3)]

        def next_of(copies: list[Any], turn: Iterator[int]) -> Any:
            return copies[next(turn) % len(copies)]

        return {
            "ours": lambda: mlx_marlin.quantized_matmul(
                x, *next_of(self.ours, turns[0]), **options
            ),
            "stock": lambda: mx.quantized_matmul(
                x, *next_of(self.stock, turns[1]), transpose=True, **of_stock
            ),
            "matmul": lambda: wide @ next_of(self.floats, turns[2]).T,
        }

    def why_not(self, x: mx.array) -> str | None:
        return mlx_marlin.why_not(x, *self.ours[0], **self.options(self.format.mode))

    def floor_bytes(self, rows: int) -> int:
        """Returns what a product must read and write: weight, x and y."""
        return self.nbytes + 2 * rows * (self.k + self.n)


class Oracle:
    """Some columns of x times the first copy of the weight, in float64."""

    def __init__(self, x: mx.array, weights: Weights) -> None:
        columns = np.random.default_rng(0).permutation(weights.n)
        self.columns = np.sort(columns[:CHECKED_COLUMNS])
        weight = decoded(weights.format, weights.native[0], self.columns)
        self.expected = exact(x) @ weight.T

    def error(self, y: mx.array) -> float:
        """Returns y's relative Frobenius error; NaN if anything is not a number."""
        expected = self.expected[: y.shape[0]]
        difference = exact(y[:, mx.array(self.columns)]) - expected
        return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def check(call: Call, other: Call, oracle: Oracle, limit: float) -> dict[str, Any]:
    """Judges the first product of ours: its error, the same bits again.

    Args:
        call: The product with the first copy of the weight.
        other: The same call, made afresh.
        oracle: What it should be.
        limit: Relative error that it may have.
    """
    try:
        y, again = call(), other()
        error = oracle.error(y)
        same = mx.array_equal(y, again).item()
    except (RuntimeError, ValueError) as raised:
        return {"error": None, "wrong": f"raised {type(raised).__name__}: {raised}"}
    wrong = None if same else "another result the second time"
    if not error < limit:
        wrong = f"relative error {error:.2e}, limit {limit:.0e}"
    return {"error": error, "wrong": wrong}


def error_of_stock(call: Call, oracle: Oracle) -> dict[str, Any]:
    """Returns stock's relative error, or what it raises."""
    try:
        return {"stock_error": oracle.error(call()), "stock_wrong": None}
    except (RuntimeError, ValueError) as raised:
        return {"stock_error": None, "stock_wrong": str(raised)}


def measure(
    weights: Weights,
    x: mx.array,
    oracle: Oracle,
    *,
    repeats: int,
    products: int,
    bandwidth: float,
) -> dict[str, Any]:
    """Checks and times the products of one shape and row count.

    Args:
        weights: What to multiply by.
        x: Activations [rows, k].
        oracle: What these and perhaps more rows should come to.
        repeats: Times that each product is timed.
        products: Products an eval.
        bandwidth: Bytes a microsecond, for the floor.

    Returns:
        The row of the report; without times if the product of ours is wrong.
    """
    rows, format = x.shape[0], weights.format
    result: dict[str, Any] = {
        "format": str(format),
        "layout": weights.layout,
        "k": weights.k,
        "n": weights.n,
        "rows": rows,
        "served_by_stock": weights.why_not(x),
    }
    calls = weights.calls(x)
    result |= error_of_stock(weights.calls(x)["stock"], oracle)
    limit = TOLERANCES[format.dtype]
    if result["served_by_stock"] is not None and result["stock_error"] is not None:
        limit = max(limit, 2 * result["stock_error"])  # no better than who serves it
    result |= check(calls["ours"], weights.calls(x)["ours"], oracle, limit)
    result["limit"] = limit
    result["plan"] = None
    if result["served_by_stock"] is None and (plans := launch.plans_built()):
        result["plan"] = label(plans[-1])
    result["floor_us"] = weights.floor_bytes(rows) / bandwidth
    if result["wrong"] is not None:
        return result
    if result["stock_wrong"] is not None:
        del calls["stock"]
    for name, times in times_of(calls, repeats, products).items():
        whole = [each.whole for each in times]
        result[f"{name}_us"] = statistics.median(whole)
        result[f"{name}_range_us"] = [min(whole), max(whole)]
        result[f"{name}_build_us"] = statistics.median(each.build for each in times)
    if "stock_us" in result:
        result["times_stock"] = result["stock_us"] / result["ours_us"]
    return result
