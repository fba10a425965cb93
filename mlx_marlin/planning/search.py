"""Predicted times of plans, and the search for the best, the same for every back end.

A back end yields candidates with their predictions. The search returns the one with the
lowest rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.plan import Plan
from mlx_marlin.tables import aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted times of one plan on one device, in seconds.

    There are two clocks. In a chain each product waits for the one before it, as in a
    model's forward pass: `seconds`, by which plans are chosen. Independent launches
    overlap: `independent_seconds`.

    Attributes:
        memory: Memory traffic of the operands and the workspace.
        issue: Instruction issue, if all cores are equally loaded.
        loads: Loaded bytes returned to lanes, if all cores are equally loaded.
        busy: Load of the mean core over that of the most loaded core, 0 to 1.
        fill: Degree to which a busy core hides latency, 0 to 1.
        dispatch: Dispatches after the first, 0 if there are none; on CUDA also the
            start and end of pieces of work.
        matrix: Matrix units that run concurrently with the others; 0 without them.
        launch: The first dispatch, if it waits for the product before it; 0 if the
            model has one clock.
    """

    memory: float
    issue: float
    loads: float
    busy: float
    fill: float
    dispatch: float
    matrix: float = 0.0
    launch: float = 0.0

    @property
    def stretch(self) -> float:
        """Factor of at least 1 for load imbalance and low occupancy."""
        return 1 / (self.busy * self.fill)

    @property
    def seconds(self) -> float:
        """Time of the whole product in a chain."""
        return self.longest * self.stretch + self.dispatch + self.launch

    @property
    def independent_seconds(self) -> float:
        """Time among launches that hide the dispatches, if the model has two clocks."""
        hidden = self.dispatch + self.launch if self.launch else 0.0
        return self.seconds - hidden

    @property
    def longest(self) -> float:
        """Longest of the times that overlap."""
        return max(self.memory, self.issue, self.loads, self.matrix)

    @property
    def bound(self) -> str:
        """The bottleneck: "memory", "issue", "loads" or "matrix"."""
        names = ("memory", "issue", "loads", "matrix")
        return max(names, key=lambda name: float(getattr(self, name)))

    def explain(self) -> str:
        """Returns the prediction as one line that says that nothing was measured."""
        times = clocks_text(self.seconds, self.independent_seconds)
        text = (
            f"predicted {times} (model, not measured): bound by "
            f"{self.bound}, x{self.stretch:.2f} for uneven or thinly filled cores"
        )
        if self.dispatch:
            text += f", {self.dispatch * 1e6:.1f} us of it for further dispatches"
        return text


def clocks_text(seconds: float, independent: float) -> str:
    """Returns the times of a chain and of independent launches as text."""
    text = f"{seconds * 1e6:.1f} us"
    if independent == seconds:
        return text
    return f"{text} in a chain, {independent * 1e6:.1f} us independently"


MODEL_ERROR = 0.06
"""Relative error of the cost models against published and measured times. Split tiles
must be predicted to gain more than this."""


class Candidate(NamedTuple):
    """A plan and its prediction."""

    rank: tuple[float, ...]
    """Sort key; the lowest is best."""
    prediction: Prediction
    """Predicted times of the plan."""
    plan: Plan
    """The plan."""

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return self.prediction.seconds


def best(candidates: Iterable[Candidate]) -> Candidate:
    """Returns the one with the lowest rank of at least one candidate."""
    return min(candidates, key=itemgetter(0))


def ranked(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Returns the candidates with different plans, ordered by rank."""
    ordered = sorted(candidates, key=itemgetter(0))
    return (*{candidate.plan: candidate for candidate in ordered}.values(),)


def split_factor(is_split: bool) -> float:
    """Returns the factor on a predicted time: split tiles must gain `MODEL_ERROR`."""
    return 1 + MODEL_ERROR * is_split


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
