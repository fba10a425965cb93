"""The result of planning: the chosen plan, its prediction and the other candidates."""

import re
import textwrap
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.prediction import Prediction
from mlx_marlin.planning.search import Candidate

WIDTH = 120
"""Most characters of a line of a table."""
NUMBER = re.compile(r"\d+(\.\d*)?(e[-+]\d+)?")
TIME = re.compile(r"([\d.]+ )?(us|ms|tokens/s)\b")
"""How cells begin that say what a time, or a column of times, is. They stay whole."""
SAME = 0.005
"""Relative difference below which two predictions count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan chosen for a product, and the reasons.

    Attributes:
        plan: The chosen plan.
        device: The device it was chosen for.
        prediction: Predicted times of the plan.
        stock: Predicted times of stock MLX, as `Backend.predict_stock` returns them;
            None on CUDA, which has no such model.
        reason: Why stock MLX serves the product instead; None if the plan does.
        candidates: All plans that were compared, the chosen one first.
    """

    plan: Plan
    device: PlanningDevice
    prediction: Prediction
    stock: Any
    reason: str | None
    candidates: tuple[Candidate, ...]

    def __repr__(self) -> str:
        """Returns a line; `table()` lists the candidates."""
        return f"<{type(self).__name__}: {self.explain()}>"

    def explain(self) -> str:
        """Returns one line with the plan, its predicted time and who serves it."""
        served = "stock MLX" if self.reason else "our kernels"
        stock = self.stock and f", stock MLX {_us(self.stock.seconds)} us"
        return (
            f"{self.plan.explain()}; predicted {_us(self.prediction.seconds)} us on "
            f"{self.device.variant}{stock or ''} (model, "
            f"not measured); served by {served}"
        )

    def table(self) -> str:
        """Returns a table of all candidates: predicted time, bottleneck, verdict."""
        heads = ["strategy", "threadgroups", "simdgroups", "slots", "busy", "us"]
        rows = [[*heads, "bound by", ""], *map(self._row, self.candidates)]
        stock = self.stock
        if stock is None:
            return aligned(rows)
        call = [stock.call.kernel, f"{stock.call.threadgroups}", "", ""]
        times = ["", _us(stock.seconds), stock.bound]
        rows.append([*call, *times, self.reason or "stock MLX, slower by the model"])
        return aligned(rows)

    def figures(self) -> dict[str, Any]:
        """Returns the choice as JSON-serializable values."""
        plan, work = self.plan, self.plan.work
        return {
            "strategy": work.strategy,
            "variant": plan.variant,
            "tile": [plan.tile.m, plan.tile.n, plan.tile.k],
            "threadgroups": work.threadgroups,
            "splits": work.slots,
            "busy": round(self.prediction.busy, 4),
            "predicted_us": round(self.prediction.seconds * 1e6, 2),
            "independent_us": round(self.prediction.independent_seconds * 1e6, 2)
            if self.prediction.launch
            else None,
            "stock_us": self.stock and round(self.stock.seconds * 1e6, 2),
            "stock_independent_us": self.stock
            and round(self.stock.independent_seconds * 1e6, 2),
            "bytes": plan.problem.bytes,
            "workspace_bytes": plan.workspace_bytes,
            "dispatches": plan.dispatches,
            "bound": self.prediction.bound,
            "served_by": "stock" if self.reason else "ours",
            "reason": self.reason or self.plan.explain(),
            "device": self.device.variant,
            "measured": False,
        }

    def _row(self, candidate: Candidate) -> list[str]:
        plan, prediction = candidate.plan, candidate.prediction
        simdgroups = "x".join(map(str, plan.simdgroup_grid))
        return [
            plan.work.strategy,
            f"{plan.work.threadgroups}",
            simdgroups,
            f"{plan.work.slots}",
            f"{prediction.busy:.2f}",
            _us(prediction.seconds),
            prediction.bound,
            self._verdict(candidate),
        ]

    def _verdict(self, candidate: Candidate) -> str:
        """Returns why a candidate was not chosen."""
        if candidate.plan == self.plan:
            return "chosen"
        other, best = candidate.prediction, self.prediction
        more = other.seconds / best.seconds - 1
        if more <= SAME:
            later = candidate.plan.dispatches > self.plan.dispatches
            return (
                "a dispatch more, for less than the model's error"
                if later
                else ("no faster, and less simple")
            )
        causes = {
            "cores less evenly busy": best.busy / other.busy,
            "too few simdgroups to hide latency": best.fill / other.fill,
            "more to read, issue or store": other.longest / best.longest,
            "further dispatches": 1 + (other.dispatch - best.dispatch) / best.seconds,
        }
        return f"{more:.1%} slower: {max(causes, key=causes.__getitem__)}"


def aligned(rows: list[list[str]]) -> str:
    """Returns a table as text: words are left-aligned, numbers right-aligned.

    Cells of a table wider than `WIDTH` are divided at spaces, times excepted, if that
    is enough.
    """
    columns = list(zip(*rows, strict=True))
    widths = _fitting(columns)
    numeric = [all(_is_number(cell) for cell in column[1:]) for column in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
        for line in zip_longest(*map(_divided, row, widths), fillvalue="")
    )


def _fitting(columns: list[tuple[str, ...]]) -> list[int]:
    """Returns the width of each column: heads are divided first, then other cells."""
    widths = [max(map(len, column)) for column in columns]
    heads = [_longest_word(column[:1]) for column in columns]
    bodies = [max(map(len, column[1:]), default=0) for column in columns]
    _shrink(widths, [*map(max, heads, bodies)])
    _shrink(widths, [*map(_longest_word, columns)])
    return widths


def _shrink(widths: list[int], least: list[int]) -> None:
    """Takes from the widest columns what the table is too wide, if they can shrink."""
    for _ in range(sum(widths) + 2 * (len(widths) - 1) - WIDTH):
        wider = [i for i, width in enumerate(widths) if width > least[i]]
        if wider:
            widths[max(wider, key=widths.__getitem__)] -= 1


def _longest_word(cells: tuple[str, ...]) -> int:
    """Returns the length of the longest part; a time stays with its mark."""
    parts = ([cell] if TIME.match(cell) else cell.split() for cell in cells)
    return max((len(part) for each in parts for part in each), default=0)


def _divided(cell: str, width: int) -> list[str]:
    """Returns the lines of a cell."""
    if len(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)


def _is_number(cell: str) -> bool:
    return not cell or NUMBER.fullmatch(cell) is not None


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"
