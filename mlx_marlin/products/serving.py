"""Decides who serves a request: our kernels, with which plan, or stock MLX, and why.

Products, experts, the report and the tuner ask `serve`, and nothing else decides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlx_marlin import guard
from mlx_marlin.backends import measured_results, planner, registry, selection
from mlx_marlin.backends.base import Backend
from mlx_marlin.planning.dequantize_plan import DequantizePlan, dequantize_plan
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.gather_plan import (
    AnyPlan,
    AnyProblem,
    GatherProblem,
)
from mlx_marlin.planning.measurement import Measured, plan_problem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import this_machine
from mlx_marlin.products.request import CPU, Request


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no kernel of ours serves a request."""

    reason: str  # One sentence, as `why_not` returns it
    # "unsupported", "speed" (stock MLX is faster) or "fault" (a kernel failed its
    # check)
    cause: Literal["unsupported", "speed", "fault"] = "unsupported"

    def __str__(self) -> str:
        return self.reason


Answer = AnyPlan | Refusal
Fault = Callable[[AnyPlan], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request is served."""

    device: PlanningDevice  # The device to plan for
    # Whether this process decides, with its back end, its default device and measured
    # results. Otherwise the model decides for a GPU of this kind
    is_here: bool = True
    # Returns why a plan's kernels must not be used, or None. Default: nothing is known
    # of kernels on another machine
    fault: Fault | None = None

    @property
    def backend(self) -> Backend:
        """The back end of the device."""
        return registry.of_device(self.device)

    @property
    def on_cpu(self) -> bool:
        """Whether calls run on the CPU."""
        return self.is_here and mx.default_device() == CPU

    @property
    def hands_over(self) -> bool:
        """Whether stock MLX serves what it computes faster."""
        return not self.is_here or selection.may_hand_over()

    def measured(self, problem: AnyProblem) -> Measured | None:
        """Returns what was measured for a problem on this machine, or None."""
        if not self.is_here:
            return None
        return measured_results.find(problem, self.device, selection.backend())


def here(fault: Fault | None = None) -> Place:
    """Returns the place of calls in this process, which checks kernels by default."""
    return Place(device=this_machine.device(), fault=fault or guard.why_not)


def serve(request: Request, place: Place) -> Answer:
    """Decides who serves a request."""
    reason = this_machine.why_not(request.on_cpu) if place.is_here else None
    if reason is not None:
        return Refusal(reason)
    problem = problem_of(request)
    if isinstance(problem, Refusal):
        return problem
    return serve_problem(problem, place, transpose=request.transpose)


def problem_of(request: Request) -> AnyProblem | Refusal:
    """Returns what to plan for a request; a refusal if no kernel of ours computes it.

    A problem's own checks are the only test of formats, sizes and dtypes.
    """
    try:
        return request.problem
    except ValueError as error:
        return Refusal(str(error))


def serve_problem(
    problem: AnyProblem, place: Place, *, transpose: bool = True
) -> Answer:
    """Decides who serves a problem, as `serve` does for a request that has it."""
    measured = place.measured(problem) if transpose else None
    answer = _fastest(problem, place, measured, transpose)
    return usable(answer, place, is_measured=measured is not None)


def _fastest(
    problem: AnyProblem, place: Place, measured: Measured | None, transpose: bool
) -> Answer:
    """Returns what serves a problem if its kernels are right."""
    device, backend, hands_over = place.device, place.backend, place.hands_over
    reason = backend.unsupported(problem, device, transpose)
    if reason is not None:
        return Refusal(reason)
    if measured is not None:
        if hands_over and measured.reason is not None:
            return Refusal(measured.reason, "speed")
        if measured.plan is not None:
            return measured.plan
    if isinstance(problem, Problem):
        if not transpose:
            return dequantize_plan(problem, transposed=False)
        decoded = _decoded(problem, place, measured) if hands_over else None
        if decoded is not None:
            return decoded
    if hands_over and measured is None:
        reason = backend.handover(problem, device)
        if reason is not None:
            return Refusal(reason, "speed")
    if isinstance(problem, GatherProblem):
        return backend.choose_gather(problem, device)
    return planner.choose(problem, device)


def _decoded(
    problem: Problem, place: Place, measured: Measured | None
) -> DequantizePlan | None:
    """Returns the plan that decodes the weight first, if that is known to be faster."""
    if measured is None or measured.decodes is None:
        return place.backend.dequantize_first(problem, place.device)
    single = problem.batch == 1 and problem.norm is None and not problem.invariant
    return dequantize_plan(problem) if measured.decodes and single else None


def usable(answer: Answer, place: Place, *, is_measured: bool = False) -> Answer:
    """Returns what serves where the kernels of a plan may have failed their check.

    An alternative was not measured: where a plan was, stock MLX is known to be right.
    It also serves rather than an alternative that is slow.
    """
    if isinstance(answer, Refusal) or place.fault is None:
        return answer
    reason = place.fault(answer)
    if reason is None:
        return answer
    other, backend, device = None, place.backend, place.device
    if not isinstance(answer, DequantizePlan):
        other = backend.alternative(answer, device)
    if other is None or (place.hands_over and is_measured):
        return Refusal(reason, "fault")
    if place.hands_over:
        plan = other if isinstance(other, Plan) else None
        if backend.handover(plan_problem(other), device, plan) is not None:
            return Refusal(reason, "fault")
    return usable(other, place)
