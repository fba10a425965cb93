"""Predicted times of plans and of stock MLX."""

from dataclasses import dataclass


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
