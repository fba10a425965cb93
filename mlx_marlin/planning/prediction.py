"""What a model says about plans and about stock MLX, in seconds."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The model's times for one plan on one device, in seconds.

    Attributes:
        memory: To move the operands and the workspace.
        issue: To issue the instructions, all cores alike.
        loads: To return the loaded bytes to the lanes, all cores alike.
        busy: The mean core's share of the work over the fullest core's, 0 to 1.
        fill: How well a busy core hides latency, 0 to 1.
        dispatch: For the dispatches after the first, 0 without one; on CUDA to begin
            and end pieces of work too.
        matrix: To multiply, where matrix units work beside the others; else 0.
    """

    memory: float
    issue: float
    loads: float
    busy: float
    fill: float
    dispatch: float
    matrix: float = 0.0

    @property
    def stretch(self) -> float:
        """Factor of at least 1 for unevenly loaded and thinly filled cores."""
        return 1 / (self.busy * self.fill)

    @property
    def seconds(self) -> float:
        """The whole product."""
        return self.longest * self.stretch + self.dispatch

    @property
    def longest(self) -> float:
        """The longest of the times that overlap."""
        return max(self.memory, self.issue, self.loads, self.matrix)

    @property
    def bound(self) -> str:
        """What takes longest: "memory", "issue", "loads" or "matrix"."""
        names = ("memory", "issue", "loads", "matrix")
        return max(names, key=lambda name: float(getattr(self, name)))

    def explain(self) -> str:
        """Says the prediction in a line, as a prediction."""
        text = (
            f"predicted {self.seconds * 1e6:.1f} us (model, not measured): bound by "
            f"{self.bound}, x{self.stretch:.2f} for uneven or thinly filled cores"
        )
        if self.dispatch:
            text += f", {self.dispatch * 1e6:.1f} us of it for further dispatches"
        return text


class StockCall(Protocol):
    """The kernel that stock MLX launches for a product."""

    @property
    def kernel(self) -> str:
        """Its name."""
        ...

    @property
    def threadgroups(self) -> int:
        """How many threadgroups it has."""
        ...


class StockPrediction(Protocol):
    """What a model says about stock MLX's own product."""

    @property
    def call(self) -> StockCall:
        """What MLX launches."""
        ...

    @property
    def seconds(self) -> float:
        """The whole product."""
        ...

    @property
    def bound(self) -> str:
        """What bounds it."""
        ...

    def explain(self) -> str:
        """Returns what MLX launches and what it should take, in a line."""
        ...
