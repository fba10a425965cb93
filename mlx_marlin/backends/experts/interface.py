"""The part of a back end's interface that concerns experts."""

from typing import Any, Protocol

from mlx_marlin.planning.gather_plan import GatherPlan, GatherProblem


class Gather(Protocol):
    """Plans experts' products (`gather_qmm`) and has the kernel that computes them.

    Attributes:
        fuses_epilogues: Whether the kernel adds a bias, and gates the product with one
            weight by that with another one.
        is_invariant: Whether it can keep the bits of a row independent of the others.
    """

    @property
    def fuses_epilogues(self) -> bool: ...  # noqa: D102
    @property
    def is_invariant(self) -> bool: ...  # noqa: D102

    def unsupported(self, gather: GatherProblem, device: Any) -> str | None:
        """Returns why the kernel cannot compute experts' products, or None."""
        ...

    def choose(self, gather: GatherProblem, device: Any) -> GatherPlan:
        """Returns the plan for experts' products."""
        ...

    def handover(self, gather: GatherProblem, device: Any) -> str | None:
        """Returns why stock MLX should serve experts' products for speed, or None."""
        ...

    def seconds(self, gather: GatherProblem, device: Any) -> tuple[float, float] | None:
        """Returns the predicted times of stock MLX and of the kernel.

        None if there is no model of experts' products.
        """
        ...
