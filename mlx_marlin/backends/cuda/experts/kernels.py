"""The CUDA back end's plans and kernels for experts' products and routing."""

from mlx_marlin.backends.arguments import TemplateValue
from mlx_marlin.backends.cuda import arguments, limits, source
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.backends.cuda.experts import search
from mlx_marlin.backends.cuda.experts.plan import CudaGatherPlan
from mlx_marlin.backends.source import Source
from mlx_marlin.planning.gather_plan import GatherProblem
from mlx_marlin.planning.work.tiles import SIMD_WIDTH

MAX_EXPERTS = 1024
"""Limit of the logits of a row, which a warp keeps in its registers: 32 a lane."""


class CudaGather:
    """Implements `Gather` for CUDA."""

    plan_type = CudaGatherPlan
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

    def source(self, plan: CudaGatherPlan) -> Source:
        """Returns the text of the kernel."""
        return source.gather_source(plan)

    def template(self, plan: CudaGatherPlan) -> dict[str, TemplateValue]:
        """Returns the template arguments of the kernel."""
        return arguments.gather_template(plan)


class CudaRouting:
    """Implements `Routing` for CUDA."""

    def supports(self, experts: int, choices: int, dtype: str) -> bool:
        """Returns whether the kernel can choose `choices` of `experts` experts."""
        return choices <= min(SIMD_WIDTH, experts) and (
            experts <= MAX_EXPERTS and dtype in limits.DTYPES
        )

    def source(self, kernel: str) -> Source:
        """Returns the text of the kernel "route" or "combine"."""
        return source.routing_source(kernel)
