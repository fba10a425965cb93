"""What a back end is: the interface between planning and launching, and its GPUs.

A third back end is a class with these members, added to `registry.BACKENDS`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from mlx_marlin.backends.arguments import TemplateValue
from mlx_marlin.backends.kernel_call import KernelCall
from mlx_marlin.backends.source import Source
from mlx_marlin.planning.dense_plan import DensePlan
from mlx_marlin.planning.overrides import PlanOverrides
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.prediction import Prediction, StockPrediction
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import Limit, Option


class Backend(Protocol):
    """Plans products for a kind of GPU, and has the kernels that compute them.

    Attributes:
        name: As `MLX_MARLIN_BACKEND` has it.
        device_type: The type of its devices.
        device_noun: What one is called, with an article.
        default_device: Stands in where the device is not known.
        kernels: The names that its plans may have for the first kernel.
        plan_type: The type of its plans.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def device_type(self) -> type[Any]: ...  # noqa: D102
    @property
    def device_noun(self) -> str: ...  # noqa: D102
    @property
    def default_device(self) -> Any: ...  # noqa: D102
    @property
    def kernels(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def plan_type(self) -> type[Plan]: ...  # noqa: D102

    def unsupported_device(self, device: Any) -> str | None:
        """Returns why no kernel of it runs on a device, or None."""
        ...

    def unsupported(
        self, problem: Problem, device: Any, transpose: bool = True
    ) -> str | None:
        """Returns why its kernels cannot compute a problem on a device, or None.

        Args:
            problem: The product to compute.
            device: A device of this back end.
            transpose: Whether it is x @ w.T.
        """
        ...

    def options(
        self, problem: Problem, device: Any, overrides: PlanOverrides, limit: Limit
    ) -> Iterable[Option]:
        """Yields what is worth comparing, at least one option.

        Raises:
            ValueError: If no plan has the wished fields.
        """
        ...

    def predict(self, plan: Any, device: Any) -> Prediction:
        """Returns what the model says about a plan."""
        ...

    def predict_stock(self, problem: Problem, device: Any) -> StockPrediction | None:
        """Returns what the model says about stock MLX; None where there is none."""
        ...

    def handover(
        self, problem: Problem, device: Any, ours: Callable[[], Prediction]
    ) -> str | None:
        """Returns why stock MLX should serve a product for speed, or None."""
        ...

    def decode_once(
        self, problem: Problem, device: Any, ours: Callable[[], Prediction]
    ) -> DensePlan | None:
        """Returns the plain product of a weight decoded once, where it is faster."""
        ...

    def experiments(self, problem: Problem, device: Any) -> Sequence[Plan]:
        """Returns plans for a tuner to try beside the candidates."""
        ...

    def cache_bytes(self, device: Any) -> int:
        """Returns the bytes of weights that no cache of a device can hold."""
        ...

    def product_source(self, plan: Any) -> Source:
        """Returns the text of a plan's first kernel."""
        ...

    def reduce_source(self, plan: Any) -> Source:
        """Returns the text of the kernel that adds a plan's splits."""
        ...

    def decode_source(self, problem: Problem) -> Source:
        """Returns the text of the kernel that decodes a block of a weight."""
        ...

    def product_template(self, plan: Any) -> dict[str, TemplateValue]:
        """Returns the template arguments of a plan's first kernel."""
        ...

    def reduce_template(self, plan: Any) -> dict[str, TemplateValue]:
        """Returns the template arguments of the reduce that follows a split plan."""
        ...

    def numbers(self, plan: Any) -> dict[str, tuple[int, ...]]:
        """Returns the integers that its kernels read, by the names of their arrays."""
        ...

    def kernel(self, source: Source, shared_bytes: int) -> KernelCall:
        """Returns a call that launches a kernel, as `mx.fast.metal_kernel` does.

        Args:
            source: The kernel.
            shared_bytes: Dynamic shared memory of a threadgroup.
        """
        ...
