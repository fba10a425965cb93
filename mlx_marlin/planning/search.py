"""Predicted times of plans, and the search for the best, the same for every back end.

A back end yields candidates with their predictions. The search returns the one with the
lowest rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from mlx_marlin.planning.plan import Plan


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
