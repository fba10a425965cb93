"""The result of planning: the chosen plan, its prediction and the other candidates."""

from dataclasses import dataclass
from typing import Any

from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.search import Candidate, Prediction
from mlx_marlin.tables import aligned

SAME = 0.005
"""Relative difference below which two predictions count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan chosen for a product, and the reasons.

    Attributes:
        plan: The chosen plan.
        device: The device it was chosen for.
        prediction: Predicted times of the plan.
        reason: Why stock MLX serves the product instead; None if the plan does.
        candidates: All plans that were compared, the chosen one first.
    """

    plan: Plan
    device: PlanningDevice
    prediction: Prediction
    reason: str | None
    candidates: tuple[Candidate, ...]

    def __repr__(self) -> str:
        """Returns a line; `table()` lists the candidates."""
        return f"<{type(self).__name__}: {self.explain()}>"

    def explain(self) -> str:
        """Returns one line with the plan, its predicted time and who serves it."""
        served = "stock MLX" if self.reason else "our kernels"
        return (
            f"{self.plan.explain()}; predicted {_us(self.prediction.seconds)} us on "
            f"{self.device.variant} (model, not measured); served by {served}"
        )

    def table(self) -> str:
        """Returns a table of all candidates: predicted time, bottleneck, verdict."""
        heads = ["strategy", "threadgroups", "simdgroups", "slots", "busy", "us"]
        rows = [[*heads, "bound by", ""], *map(self._row, self.candidates)]
        if self.reason:
            rows.append(["stock MLX", *[""] * 6, self.reason])
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


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"
