"""The Metal back end's plans and kernel for experts' products."""

from mlx_marlin.backends.arguments import TemplateValue
from mlx_marlin.backends.metal import arguments, source
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts import search
from mlx_marlin.backends.metal.experts.plan import MetalGatherPlan
from mlx_marlin.backends.source import Source
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.work.tiles import SIMD_WIDTH
from mlx_marlin.weights.formats import DTYPE_BYTES

MAX_EXPERTS = 1024
"""Limit of the experts of a row: a lane keeps every 32nd logit in a register."""


class MetalRouting:
    """Implements `Routing` for Metal."""

    def supports(self, experts: int, choices: int, dtype: str) -> bool:
        """Returns whether the kernel can choose `choices` of `experts` experts."""
        known = dtype in DTYPE_BYTES and experts <= MAX_EXPERTS
        return known and choices <= min(SIMD_WIDTH, experts)

    def source(self, kernel: str) -> Source:
        """Returns the text of the kernel "route" or "combine"."""
        return source.routing_source(kernel)


class MetalGather:
    """Implements `Gather` for Metal."""

    plan_type = MetalGatherPlan
    fuses_epilogues = True
    is_invariant = True

    def unsupported(self, gather: GatherProblem, device: Device) -> str | None:
        """Returns why the kernel cannot compute experts' products, or None."""
        if gather.gate is None:
            return None
        if gather.problem.layout != "marlin" or gather.problem.invariant:
            return (
                "our Metal kernel for experts gates packed weights, of products that "
                "are not invariant"
            )
        return None

    def choose(self, gather: GatherProblem, device: Device) -> MetalGatherPlan:
        """Returns the plan for experts' products."""
        return search.choose_gather(gather, device)

    def handover(self, gather: GatherProblem, device: Device) -> str | None:
        """Returns why stock MLX should serve experts' products for speed, or None."""
        return search.gather_handover(gather, device)

    def seconds(self, gather: GatherProblem, device: Device) -> tuple[float, float]:
        """Returns the predicted times of stock MLX and of the kernel."""
        return search.gather_seconds(gather, device)

    def source(self, plan: MetalGatherPlan) -> Source:
        """Returns the text of the kernel."""
        return source.gather_source(plan.gather.is_fused)

    def template(self, plan: MetalGatherPlan) -> dict[str, TemplateValue]:
        """Returns the template arguments of the kernel."""
        return arguments.gather_template(plan)
