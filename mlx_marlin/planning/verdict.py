"""Who serves a request: a plan of ours, or a refusal."""

from dataclasses import dataclass
from typing import Literal

from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.gather_plan import GatherPlan
from mlx_marlin.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no kernel of ours serves a request."""

    reason: str  # One sentence, as `why_not` returns it
    # "unsupported", "speed" (stock MLX is faster) or "fault" (a kernel failed its
    # check)
    cause: Literal["unsupported", "speed", "fault"] = "unsupported"

    def __str__(self) -> str:
        return self.reason


AnyPlan = Plan | DequantizePlan | GatherPlan
Answer = AnyPlan | Refusal
