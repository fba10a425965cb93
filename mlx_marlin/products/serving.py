"""Decides who serves a request: our kernels, with which plan, or stock MLX, and why.

Products, experts, the report and the tuner ask `serve`, and nothing else decides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

import mlx.core as mx

from mlx_marlin import guard
from mlx_marlin.backends import planner, registry, selection, tuned_results
from mlx_marlin.backends.base import Backend
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.gather_plan import AnyProblem
from mlx_marlin.planning.measurement import Measured
from mlx_marlin.planning.verdict import Answer, AnyPlan, Refusal
from mlx_marlin.products import eligibility
from mlx_marlin.products.request import CPU, MatmulRequest

if TYPE_CHECKING:
    from mlx_marlin.products.experts.request import GatherRequest

Request = Union[MatmulRequest, "GatherRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a decision is for."""

    device: PlanningDevice  # The device to plan for
    # Whether this process decides, with its back end, its default device and measured
    # results. Otherwise the model decides for a GPU of this kind
    is_here: bool = True
    # Returns why a plan's kernels must not be used here, or None. Default: checks
    # kernels that nobody has checked
    fault: Callable[[AnyPlan], str | None] = guard.why_not

    @property
    def backend(self) -> Backend:
        """The back end of the device."""
        return registry.of_device(self.device)

    @property
    def on_cpu(self) -> bool:
        """Whether calls run on the CPU."""
        return self.is_here and mx.default_device() == CPU

    def measured(self, problem: AnyProblem) -> Measured | None:
        """Returns what was measured for a problem on this machine, or None."""
        if not self.is_here:
            return None
        return tuned_results.find(problem, self.device, selection.backend())


def here(fault: Callable[[AnyPlan], str | None] | None = None) -> Target:
    """Returns the target of calls in this process."""
    return Target(device=eligibility.target(), fault=fault or guard.why_not)


def serve(request: Request, target: Target) -> Answer:
    """Decides who serves a request."""
    reason = eligibility.not_here(request.on_cpu) if target.is_here else None
    if reason is not None:
        return Refusal(reason)
    problem = problem_of(request)
    if isinstance(problem, Refusal):
        return problem
    return serve_problem(problem, target, transpose=request.transpose)


def problem_of(request: Request) -> AnyProblem | Refusal:
    """Returns what to plan for a request; a refusal if no kernel of ours computes it.

    A problem's own checks are the only test of formats, sizes and dtypes.
    """
    try:
        return request.problem
    except ValueError as error:
        return Refusal(str(error))


def serve_problem(
    problem: AnyProblem, target: Target, *, transpose: bool = True
) -> Answer:
    """Decides who serves a problem, as `serve` does for a request that has it."""
    measured = target.measured(problem) if transpose else None
    hands_over = not target.is_here or selection.may_hand_over()
    answer = planner.serve(
        problem,
        target.device,
        transpose=transpose,
        measured=measured,
        hands_over=hands_over,
    )
    if not target.is_here:
        return answer  # nothing is known of kernels on another machine
    return planner.usable(
        answer,
        target.device,
        target.fault,
        hands_over=hands_over,
        is_measured=measured is not None,
    )
