"""Checks and times one product: ours, stock MLX's and a float16 matmul.

Correctness first: ours is compared with float64 on exactly decoded weights before it is
timed, all rows of some columns. These are put together on the device: MLX compiles its
gather for seconds, and an array that the host has read stays in memory of both.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
from cuda_timing import Build, Clock, times_of
from cuda_weights import (
    SPREAD,
    Format,
    Native,
    biases_of_stock,
    decoded,
    exact,
    random_native,
    taken,
)

import mlx_marlin
from mlx_marlin.backends import graph, selection
from mlx_marlin.planning.measurement import label
from mlx_marlin.planning.plan import Plan
from mlx_marlin.products.autodiff import without_vjp

Shape = tuple[int, int]
"""k, n."""
Call = Callable[[], mx.array]
Product = Callable[[mx.array, Any], mx.array]
"""Of x and the arrays of a weight."""

TOLERANCES = {"float16": 1e-3, "bfloat16": 6e-3}
"""Most relative Frobenius error against exactly decoded weights in float64."""
CHECKED_COLUMNS = 256
WAYS = ("", "_stream", "_traced", "_traced_stream")
"""Ends of the names of ours' and stock's times: how graphs are built and waited for."""


def product_of_ours(x: mx.array, weight: tuple[Any, ...], format: Format) -> mx.array:
    """Multiplies by a packed weight, or by codes, scales and biases."""
    return mlx_marlin.quantized_matmul(x, *weight, **options(format, format.mode))


def product_of_stock(x: mx.array, weight: Native, format: Format) -> mx.array:
    """Multiplies as stock MLX does; biases as `biases_of_stock` gives them."""
    return mx.quantized_matmul(
        x, *weight, transpose=True, **options(format, format.of_stock)
    )


def options(format: Format, mode: str) -> dict[str, Any]:
    return {"group_size": format.group_size, "bits": format.bits, "mode": mode}


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
        packed = mlx_marlin.pack(*native, **options(self.format, self.format.mode))
        mx.eval(packed.words, packed.scales)
        return (packed,)

    def calls(self, x: mx.array) -> dict[str, Call]:
        """Returns what is compared; each call takes the next copy of the weight."""
        wide, turns = x.astype(mx.float16), [count() for _ in range(3)]

        def next_of(copies: list[Any], turn: Iterator[int]) -> Any:
            return copies[next(turn) % len(copies)]

        return {
            "ours": lambda: product_of_ours(
                x, next_of(self.ours, turns[0]), self.format
            ),
            "stock": lambda: product_of_stock(
                x, next_of(self.stock, turns[1]), self.format
            ),
            "matmul": lambda: wide @ next_of(self.floats, turns[2]).T,
        }

    def traced(self, x: mx.array, products: int, name: str) -> Build:
        """Returns what builds several products, "ours" or "stock", as one traced graph.

        Weights are its inputs, and each evaluation takes the next ones, as the layers
        of a traced model do.
        """
        if name == "ours":
            copies = [self._arrays(each) for each in self.ours]
            return traced(x, copies, self._product, products)
        return traced(
            x, self.stock, lambda x, w: product_of_stock(x, w, self.format), products
        )

    def _arrays(self, weight: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.layout == "mlx":
            return weight
        (packed,) = weight
        return packed.words, packed.scales

    def _product(self, x: mx.array, arrays: tuple[Any, ...]) -> mx.array:
        if self.layout == "mlx":
            return product_of_ours(x, arrays, self.format)
        words, scales = arrays
        packed = replace(self.ours[0][0], words=words, scales=scales)
        return product_of_ours(x, (packed,), self.format)

    def why_not(self, x: mx.array) -> str | None:
        return mlx_marlin.why_not(
            x, *self.ours[0], **options(self.format, self.format.mode)
        )

    def floor_bytes(self, rows: int) -> int:
        """Returns what a product must read and write: weight, x and y."""
        return self.nbytes + 2 * rows * (self.k + self.n)


def traced(x: mx.array, copies: list[Any], product: Product, products: int) -> Build:
    """Returns what builds several products of x by replaying one graph.

    Args:
        x: Activations.
        copies: Arrays of each weight; they take turns.
        product: What is traced, as blocks are: without derivatives.
        products: How many there are in a graph.
    """

    def all_of(x: mx.array, *weights: Any) -> list[mx.array]:
        return [product(x, weight) for weight in weights]

    def next_of(start: int) -> list[Any]:
        return [copies[(start + i) % len(copies)] for i in range(products)]

    replayed: Callable[..., list[mx.array]] = all_of
    if selection.backend() != "emulator":  # which computes at once
        replayed = mx.compile(all_of)
        with without_vjp():
            replayed(x, *next_of(0))
    starts = count(step=products)
    return lambda: replayed(x, *next_of(next(starts)))


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
        difference = exact(taken(y, self.columns, axis=1)) - expected
        return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def check(
    call: Call, others: list[Call], oracle: Oracle, limit: float
) -> dict[str, Any]:
    """Judges the first product of ours: its error, the same bits again.

    Args:
        call: The product with the first copy of the weight.
        others: The same product, asked for afresh and out of a traced graph.
        oracle: What it should be.
        limit: Relative error that it may have.
    """
    try:
        y, *again = call(), *(other() for other in others)
        error = oracle.error(y)
        same = all(mx.array_equal(y, each).item() for each in again)
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


def plan_of(rows: int, shape: Shape, format: Format, layout: str) -> Plan | None:
    """Returns the plan of ours that was prepared last for a product, if any."""
    sought = (rows, *shape, str(format), layout)
    for plan in reversed(graph.plans_built()):
        problem = plan.problem
        own = Format(problem.mode, problem.bits, problem.group_size, problem.dtype)
        if (problem.m, problem.k, problem.n, str(own), problem.layout) == sought:
            return plan
    return None


def checked(weights: Weights, x: mx.array, oracle: Oracle) -> dict[str, Any]:
    """Checks the products of one shape and row count.

    Args:
        weights: What to multiply by.
        x: Activations [rows, k].
        oracle: What these and perhaps more rows should come to.

    Returns:
        The row of the report, still without times.
    """
    result: dict[str, Any] = {
        "format": str(weights.format),
        "layout": weights.layout,
        "k": weights.k,
        "n": weights.n,
        "rows": x.shape[0],
        "served_by_stock": weights.why_not(x),
    }
    result |= error_of_stock(weights.calls(x)["stock"], oracle)
    limit = TOLERANCES[weights.format.dtype]
    if result["served_by_stock"] is not None and result["stock_error"] is not None:
        limit = max(limit, 2 * result["stock_error"])  # no better than who serves it
    ours, again = (weights.calls(x)["ours"] for _ in range(2))
    others = [again, lambda: weights.traced(x, 1, "ours")()[0]]
    result |= check(ours, others, oracle, limit) | {"limit": limit, "plan": None}
    shape = weights.k, weights.n
    plan = plan_of(x.shape[0], shape, weights.format, weights.layout)
    if result["served_by_stock"] is None and plan is not None:
        result["plan"] = label(plan)
    return result


def timed(
    weights: Weights,
    x: mx.array,
    result: dict[str, Any],
    clock: Clock,
    bandwidth: float,
) -> dict[str, Any]:
    """Times the products of one shape and row count that was checked.

    Args:
        weights: What to multiply by.
        x: Activations [rows, k].
        result: What `checked` returned.
        clock: How often.
        bandwidth: Bytes a microsecond, for the floor.

    Returns:
        The rest of the row of the report: the floor alone if ours is wrong.
    """
    row: dict[str, Any] = {"floor_us": weights.floor_bytes(x.shape[0]) / bandwidth}
    if result["wrong"] is not None:
        return row
    calls = weights.calls(x)
    if result["stock_wrong"] is not None:
        del calls["stock"]
    builds: dict[str, Build] = {
        name: partial(_several, call, clock.products) for name, call in calls.items()
    }
    for name in ("ours", "stock"):
        if name in calls:
            builds[f"{name}_traced"] = weights.traced(x, clock.products, name)
    # What the host has read is in memory of both: no result may be put there.
    mx.clear_cache()
    row |= times_of(builds, clock)
    for way in WAYS if "stock" in builds else ():
        row[f"times_stock{way}"] = row[f"stock{way}_us"] / row[f"ours{way}_us"]
    return row


def _several(call: Call, products: int) -> list[mx.array]:
    return [call() for _ in range(products)]
