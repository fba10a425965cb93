"""The CUDA back end's plans and kernels for experts' products and routing."""

from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.experts import search
from mlx_marlin.backends.cuda.experts.plan import CudaGatherPlan
from mlx_marlin.planning.gather_plan import GatherProblem


class CudaGather:
    """Implements `Gather` for CUDA."""

    fuses_epilogues = True
    is_invariant = False

    def unsupported(self, gather: GatherProblem, device: CudaDevice) -> str | None:
        """Returns why the kernel cannot compute experts' products, or None."""
        return search.gather_unsupported(gather, device)

    def choose(self, gather: GatherProblem, device: CudaDevice) -> CudaGatherPlan:
        """Returns the plan for experts' products."""
        return search.choose_gather(gather, device)

    def handover(self, gather: GatherProblem, device: CudaDevice) -> None:
        """Returns None: stock MLX is not faster."""

    def seconds(self, gather: GatherProblem, device: CudaDevice) -> None:
        """Returns None: there is no model of experts' products."""
