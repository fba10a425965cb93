"""The part of a back end's interface that concerns experts."""

from typing import Any, Protocol

from mlx_marlin.backends.arguments import TemplateValue
from mlx_marlin.backends.source import Source
from mlx_marlin.planning.gather_plan import GatherPlan, GatherProblem


class Gather(Protocol):
    """Plans experts' products (`gather_qmm`) and has the kernel that computes them.

    Attributes:
        plan_type: The type of its plans.
        fuses_epilogues: Whether the kernel adds a bias, and gates the product with one
            weight by that with another one.
        is_invariant: Whether it can keep the bits of a row independent of the others.
    """

    @property
    def plan_type(self) -> type[GatherPlan]: ...  # noqa: D102
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

    def source(self, plan: Any) -> Source:
        """Returns the text of the kernel.

        It reads m, n and k as "shape" or "numbers". Its other inputs are
        `source.OPERANDS`, "experts" and, if the plan has no `pairs_per_row`, "sources":
        the row of x of each pair.
        """
        ...

    def template(self, plan: Any) -> dict[str, TemplateValue]:
        """Returns the template arguments of the kernel."""
        ...


class Routing(Protocol):
    """Kernels that choose experts and add up their results."""

    def supports(self, experts: int, choices: int, dtype: str) -> bool:
        """Returns whether the kernels choose `choices` of `experts` experts.

        Args:
            experts: Logits of a row.
            choices: Experts that a row chooses.
            dtype: Dtype of the logits.
        """
        ...

    def source(self, kernel: str) -> Source:
        """Returns the text of the kernel "route" or "combine"."""
        ...
