"""Decides when stock MLX serves a call on a Mac where nobody has measured it.

A weight in MLX's layout goes by a table, `data/handover.json`. `python -m
benchmarks.stock` writes it by a model of stock MLX, from products of common sizes: a
measurement on this machine always beats it. A packed weight stays with our kernels, but
what its product fuses may be predicted to be faster apart.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.rates import level_seconds, memory_seconds
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import MODEL_ERROR, Prediction

MOST_SLOWER = 1.15
"""Times the time of our best plan that another one may be predicted to take where the
table says that our kernels serve: our least lead over stock MLX in the table."""
FILE = Path(__file__).parents[2] / "data" / "handover.json"


class Ranges(NamedTuple):
    """Numbers of rows that are served, as first and last ones of ranges."""

    ranges: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, text: str) -> "Ranges":
        """Reads the table's form, such as "5-31 33-63 129-"."""
        ends = re.findall(r"(\d+)-(\d*)", text)
        return cls(tuple((int(a), int(b) if b else inf) for a, b in ends))

    def has(self, rows: int) -> bool:
        """Returns whether a number of rows is in a range."""
        return any(first <= rows <= last for first, last in self.ranges)

    def __str__(self) -> str:
        texts = [
            f"{first} and more" if last == inf else f"{first} to {last}"
            for first, last in self.ranges
        ]
        return f"{', '.join(texts) or 'no number of'} rows"


class Line(NamedTuple):
    """What the table says of weights in MLX's layout, in a format, on a chip."""

    chip: str  # The chip of the table
    ours: Ranges  # Rows with which our kernels serve if no weight is decoded first
    decoded: Ranges  # Rows with which a weight is decoded first
    # Least pairs per expert of our kernel for experts, and the most of sorted pairs,
    # below the least where sorted pairs are never ours
    experts: tuple[float, float]


def reason(
    problem: Problem, device: Device, predicted: Callable[[], Prediction]
) -> str | None:
    """Returns why stock MLX serves a weight in MLX's layout; None if it does not.

    `predicted`: the times of our plan. It is not the best one if a user asks for it, or
    if it stands in for one that a GPU computes wrong.
    """
    line = line_of(problem, device)
    if problem.invariant:
        return None
    if line.ours.has(problem.m):
        best = planner.propose(problem, device).prediction
        ratio = predicted().seconds / best.seconds
        if ratio <= MOST_SLOWER:
            return None
        return (
            f"{_rows(problem.m)} on {device.variant}: this plan is predicted to take "
            f"{ratio:.2f} times the time of the best one, for which the table of "
            f"{line.chip} was written"
        )
    return (
        f"{_rows(problem.m)} on {device.variant}: by the table of {line.chip} our "
        f"kernels serve {line.ours} of such a weight (not measured here)"
    )


def reason_of_experts(gather: GatherProblem, device: Device) -> str | None:
    """Returns why stock MLX serves experts in MLX's layout; None if it does not."""
    problem = gather.problem
    if problem.layout != "mlx" or problem.invariant:
        return None
    line = line_of(problem, device)
    least, most = line.experts
    pairs = problem.m / gather.experts
    if least <= pairs and not (gather.is_sorted and pairs > most):
        return None
    limits = f"from {least:g}" + f" to {most:g}" * gather.is_sorted
    if gather.is_sorted and most < least:
        limits = "no number of sorted"
    return (
        f"{_rows(problem.m)} over {gather.experts} experts on {device.variant}: by the "
        f"table of {line.chip} our kernel serves {limits} rows an expert (not measured "
        f"here)"
    )


def is_decoded_first(problem: Problem, device: Device) -> bool:
    """Returns whether a weight in MLX's layout is decoded and then multiplied."""
    return line_of(problem, device).decoded.has(problem.m)


@lru_cache(maxsize=4096)
def line_of(problem: Problem, device: Device) -> Line:
    """Returns what the table says of a product on a device."""
    table, chip = _table(), _chip(device)
    found = table["chips"][chip][problem.dtype][f"{problem.mode} {problem.bits}"]
    size = bisect_right(table["columns"], problem.n) - 1
    ours, decoded = (
        Ranges.of(found[name][size] if size >= 0 and name in found else "")
        for name in ("ours", "decoded")
    )
    return Line(chip, ours, decoded, tuple(found["experts"]))


def _chip(device: Device) -> str:
    """Returns the chip of the table that stands for a device.

    It is the newest one up to the device's generation that has its tier, and tensor
    units as the device has them.
    """
    known = [Device.named(name) for name in _table()["chips"]]
    tier = "base" if device.tier == "unknown" else device.tier
    units = device.has_tensor_units
    alike = [each for each in known if each.has_tensor_units == units]
    alike = [each for each in alike if each.tier == tier] or alike
    older = [each for each in alike if each.arch_gen <= device.arch_gen]
    return (older or alike[:1])[-1].name


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return table


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def faster_apart(
    problem: Problem, device: Device, product: float, fused: float
) -> str | None:
    """Returns why separate operations are predicted to be faster, or None.

    They must be faster by `MODEL_ERROR`: a caller asks for one kernel.

    `product`: predicted seconds of the best plan without the norm, or without the
    epilogue.
    `fused`: predicted seconds of the best plan with it.
    """
    norm = norm_seconds(problem, device)
    apart = product + (norm or epilogue_seconds(problem, device))
    if fused <= apart * (1 + MODEL_ERROR):
        return None
    return (
        f"{_rows(problem.m)} on {device.variant}: the model gives a product and its "
        f"{'norm' if norm else 'epilogue'} {apart * 1e6:.1f} us as separate "
        f"operations, and {fused * 1e6:.1f} us as one kernel"
    )


def norm_seconds(problem: Problem, device: Device) -> float:
    """Returns the predicted seconds of an RMSNorm of x as an operation of its own."""
    if problem.norm is None:
        return 0.0
    moved = 2 * problem.activation_bytes
    return level_seconds(device) + memory_seconds(moved, device)


def epilogue_seconds(problem: Problem, device: Device) -> float:
    """Returns the predicted seconds of an epilogue as one operation of its own."""
    epilogue = problem.epilogue
    if epilogue == PLAIN:
        return 0.0
    moved = (2 + epilogue.operands + epilogue.gated) * problem.output_bytes
    return level_seconds(device) + memory_seconds(moved, device)
