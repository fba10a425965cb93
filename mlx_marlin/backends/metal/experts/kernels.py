"""The Metal back end's plans and kernel for experts' products."""

from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.experts import search
from mlx_marlin.backends.metal.experts.plan import MetalGatherPlan
from mlx_marlin.planning.gather_plan import GatherProblem


class MetalGather:
    """Implements `Gather` for Metal."""

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
