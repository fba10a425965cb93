"""Published times of kernels like ours beside those of our model.

The times are those of `data/published_kernel_times.json`. Run as a program, this file
prints them, the predicted speeds over stock MLX on M5, and the errors that docs/m5.md
and docs/stock_model.md state.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.stock.decision import stock_seconds
from benchmarks.stock.prediction import stock_prediction
from mlx_marlin.backends import planner, registry
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.products import serving
from mlx_marlin.products.serving import Refusal

FILE = Path(__file__).parent / "data" / "published_kernel_times.json"
CHAINS = ("ms of a forward", "ms")
"""Units of times in a chain; the others are of independent launches."""

PREDICTED_ROWS = (6, 8, 9, 12, 16, 17, 24, 32, 48, 64, 128)
SHAPES = ((17408, 5120), (5120, 17408), (14336, 4096), (4096, 4096), (2048, 2048))
"""n and k of the predictions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published figure."""

    chip: str  # Its name and core count, such as "M5 Max, 40"
    source: str  # A repository and what of it
    name: str  # What the table calls the products
    products: tuple[tuple[int, int, int], ...]  # Count, k and n
    m: int  # Rows of x
    unit: str  # "ms of a forward", "ms", "times one row" of stock MLX, or "GB/s"
    value: float  # The figure
    kernel: str = "gemm_tensor"  # The kernel of ours that the model is asked for
    bits: int = 4  # Bits of a code
    # Published time of one row, of which the other operations are taken to need what
    # exceeds the model's products
    one_row: float = 0.0
    fitted: bool = False  # Whether the kernel's constants were fitted to it
    note: str = ""  # Key of a note, or empty

    @property
    def device(self) -> Device:
        name, _, cores = self.chip.partition(", ")
        return Device.named(name, int(cores))

    def problems(self, m: int) -> list[tuple[int, Problem]]:
        return [
            (count, problem_of(m, n, k, bits=self.bits, dtype="bfloat16"))
            for count, k, n in self.products
        ]

    def stock_ms(self) -> float:
        """The model's time of one row of all products in stock MLX."""
        total = 0.0
        for count, problem in self.problems(1):
            prediction = stock_prediction(problem, self.device)
            chain = self.unit in CHAINS
            total += count * (
                prediction.seconds if chain else prediction.independent_seconds
            )
        return 1e3 * total

    def ours_ms(self) -> float:
        """The model's time of all products in our kernel."""
        total = 0.0
        for count, problem in self.problems(self.m):
            # The measured kernels multiply codes without an offset, as floats.
            form: PlanOverrides = (
                {"operand": "exact"} if self.kernel == "gemm_register" else {}
            )
            plan = planner.make(problem, device=self.device, kernel=self.kernel, **form)
            prediction = planner.predict(plan, self.device)
            chain = self.unit in CHAINS
            total += count * (
                prediction.seconds if chain else prediction.independent_seconds
            )
        return 1e3 * total

    def model(self) -> float:
        """The model's figure in the row's unit."""
        ours = self.ours_ms()
        if self.unit == "ms of a forward":
            return self.one_row - self.stock_ms() + ours
        if self.unit == "times one row":
            return ours / self.stock_ms()
        if self.unit == "GB/s":
            size = sum(count * each.weight_bytes for count, each in self.problems(1))
            return size / ours / 1e6
        return ours

    def error(self) -> float:
        """The model's time over the published one, minus 1."""
        ratio = self.model() / self.value
        return (1 / ratio if self.unit == "GB/s" else ratio) - 1


def rows() -> list[Row]:
    """Returns the published figures in the order of the table."""
    data = _data()
    found = []
    for row in data["rows"]:
        name = row.pop("products")
        products = tuple(tuple(each) for each in data["models"][name])
        found.append(Row(name=name, products=products, **row))
    return found


def fitted(kernel: str, generation: str) -> list[Row]:
    """Returns the figures that the constants of a kernel of ours were fitted to."""
    return [
        row
        for row in rows()
        if row.fitted and row.kernel == kernel and row.chip.startswith(generation)
    ]


def mean_factor(of: list[Row]) -> float:
    """Returns the factor between the model and some figures, in the mean."""
    return exp(fmean(log(1 + row.error()) for row in of))


def lines() -> Iterator[str]:
    """Yields a line for each figure: the model's, its error, and its note."""
    for row in rows():
        products = row.name + (f", {row.bits} bits" if row.bits != 4 else "")
        marks = ", ".join(filter(None, ("fitted" * row.fitted, row.note)))
        yield (
            f"{row.chip} ({row.source}): {row.m} x {products}, {row.kernel}: "
            f"{row.value:g} {row.unit}, {row.model():.3g} predicted, "
            f"{row.error():+.0%} of time {marks}"
        )


def mean_error(of: list[Row]) -> float:
    """Returns the mean of the absolute errors of some figures."""
    return fmean(abs(row.error()) for row in of)


def summary(of: list[Row]) -> str:
    """Returns the mean error of some figures and the worst three as text."""
    worst = sorted(of, key=lambda row: abs(row.error()), reverse=True)[:3]
    named = (
        f"{row.m} x {row.name} of {row.bits} bits ({row.error():+.1%})" for row in worst
    )
    return f"{mean_error(of):.1%} in the mean; the worst are {', '.join(named)}"


def predictions() -> Iterator[str]:
    """Yields lines of predicted speeds over stock MLX on M5, each for a product."""
    for chip in ("M5 Max", "M5 Pro", "M5"):
        device = Device.named(chip)
        for n, k in SHAPES:
            cells = (
                f"{m}: {_cell(problem_of(m, n, k, dtype='bfloat16'), device)}"
                for m in PREDICTED_ROWS
            )
            yield f"{chip}, {k}→{n}: {', '.join(cells)}"


def speed(problem: Problem, device: Device) -> float:
    """Returns the predicted speed over stock MLX of what serves; 1 if stock does."""
    served = serving.serve_problem(problem, serving.Place(device=device, is_here=False))
    if isinstance(served, Refusal):
        return 1.0
    backend = registry.of_device(device)
    ours = (
        planner.predict(served, device).seconds
        if isinstance(served, Plan)
        else backend.seconds(served, device)
    )
    return float(stock_seconds(problem, device) / ours)


def _cell(problem: Problem, device: Device) -> str:
    """Returns the same with the kernel that serves."""
    served = serving.serve_problem(problem, serving.Place(device=device, is_here=False))
    if isinstance(served, Refusal):
        return "stock"
    kernel = served.kernel if isinstance(served, Plan) else "decoded first"
    return f"{speed(problem, device):.2f} {kernel}"


def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return data


if __name__ == "__main__":
    print(*predictions(), "", *lines(), "", sep="\n")
    print(*(f"{key}: {text}" for key, text in _data()["notes"].items()), sep="\n")
    print(f"\ngemm_register on M4: {summary(fitted('gemm_register', 'M4'))}")
    print(f"gemm_tensor: factor {mean_factor(fitted('gemm_tensor', 'M5')):.3f}")
