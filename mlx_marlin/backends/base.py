"""The interface between planning and launching on one side and a GPU on the other.

A third back end is a class with the members of `Backend`; see `registry`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mlx_marlin.backends.children import Ahead
from mlx_marlin.backends.launch import Launch
from mlx_marlin.backends.source import Source
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.device import Residency
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.gather_plan import AnyProblem, GatherPlan, GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import Candidate, Prediction

if TYPE_CHECKING:
    import mlx.core as mx
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.weights.formats import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the code outside a back end has to know about it and its GPU."""

    device_noun: str  # What one of its devices is called in messages, with an article
    # The device to plan for if this machine's is not known
    default_device: PlanningDevice
    # The names that its plans of products may have for the first kernel
    kernels: tuple[str, ...]
    plan_type: type[Plan]  # The type of its plans of products
    launches: frozenset[type]  # The types of plans that it launches
    # The layout that `optimize` gives weights: "mlx", or "marlin" where packed products
    # are faster
    default_layout: str = "mlx"
    # Dtypes of the activations that its kernels multiply
    dtypes: tuple[str, ...] = (*DTYPE_BYTES,)
    # Whether a traced graph of a call costs the host less than the call. If so, calls
    # are traced, and `optimize` joins layers and traces decoder blocks by default
    replays_graphs: bool = False
    # Whether MLX passes inputs of few elements in an address space that the kernels do
    # not read, so that they must be padded
    pads_small_inputs: bool = False
    # Whether the GPU reads an array that the host has written as fast as one of its own
    unified_memory: bool = True
    # Whether stock MLX multiplies activations in float32 by quantized weights, for any
    # number of rows
    stock_multiplies_float32: bool = True
    # Whether stock MLX's attention kernel for few queries takes a mask
    stock_masks_attention: bool = True
    # Whether stock MLX chooses its attention kernel by the capacity of the KV cache
    stock_attends_by_capacity: bool = False
    # Whether kernels can be compiled before they are launched, and several at a time
    compiles_ahead: bool = False
    # The fusions of a traced decoder block that are on by default (`lm.options`)
    fusions: frozenset[str] = frozenset({"residual"})
    # Whether the kernel of experts' products can keep the bits of a row independent of
    # the other rows
    keeps_experts_bits: bool = False
    # Whether `mlx-marlin tune MODEL` compares the options of `optimize`, and `optimize`
    # uses the result
    tunes_models: bool = True


KernelCall = Callable[..., list["mx.array"]]
"""What `mx.fast.metal_kernel` and `mx.fast.cuda_kernel` return: adds one dispatch to
the graph."""


class Prepared(NamedTuple):
    """A kernel that a back end has prepared, or can compile."""

    source: Source  # The text to launch
    # A name of the compiled kernel; empty if there is nothing to compile
    name: str = ""
    # Compiles and keeps the kernel, or None if that is done
    compile: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A launch with known results. If they differ, no plan that depends on it is
    used."""

    launch: Launch  # The kernel; its only input is an array that it does not read
    # Returns what is wrong with the output's elements, or None
    fault: Callable[[Sequence[float]], str | None]


class Backend(Protocol):
    """Plans products for a kind of GPU, and has the kernels that compute them."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def traits(self) -> Traits: ...  # noqa: D102

    def find_device(self, name: str, cores: int | None) -> Any:
        """Returns a device by its name.

        `cores`: number of cores; None for the largest variant.
        """
        ...

    def detect_device(self) -> Any | None:
        """Returns this machine's device, or None if the back end has none here."""
        ...

    def system_build(self) -> str:
        """Returns the version of what the compiler of its kernels comes with."""
        ...

    def unsupported(
        self, problem: AnyProblem, device: Any, transpose: bool = True
    ) -> str | None:
        """Returns why its kernels cannot compute a problem on a device, or None."""
        ...

    def candidates(
        self, problem: Problem, device: Any, overrides: PlanOverrides
    ) -> Iterable[Candidate]:
        """Yields the plans to compare, at least one."""
        ...

    def ahead(self, mlx: str) -> Ahead | None:
        """Returns what compiles MLX's own kernels ahead, for a version of MLX."""
        ...

    def experiments(self, problem: Problem, device: Any) -> Sequence[Plan]:
        """Returns plans for a tuner to try in addition to the candidates."""
        ...

    def choose_gather(self, gather: GatherProblem, device: Any) -> GatherPlan:
        """Returns the plan for experts' products."""
        ...

    def predict(self, plan: Any, device: Any) -> Prediction:
        """Returns the times that the cost model predicts for a plan of a product."""
        ...

    def seconds(self, plan: Any, device: Any) -> float | None:
        """Returns the predicted time of a plan that decodes first or is of experts.

        None if there is no model of it.
        """
        ...

    def residency(self, plan: Any, device: Any) -> Residency:
        """Returns how many threadgroups of a plan are resident on a core."""
        ...

    def handover(
        self, problem: AnyProblem, device: Any, plan: Any = None
    ) -> str | None:
        """Returns why stock MLX should serve a problem for speed, or None.

        `plan`: ours; None for the best one.
        """
        ...

    def dequantize_first(self, problem: Problem, device: Any) -> DequantizePlan | None:
        """Returns the plan that decodes the weight first, if it is faster."""
        ...

    def probes(self, plan: Any) -> Sequence[Probe]:
        """Returns what has to be checked before a plan's kernels are."""
        ...

    def alternative(self, plan: Any, device: Any) -> Plan | GatherPlan | None:
        """Returns the plan to use if the kernel of a plan fails its check.

        None if stock MLX serves the product then.
        """
        ...

    def launches(self, plan: Any) -> tuple[Launch, ...]:
        """Returns the launches that compute a plan, in order."""
        ...

    def kernel(self, launch: Launch) -> KernelCall:
        """Returns a call that adds the launch's kernel to MLX's graph."""
        ...
