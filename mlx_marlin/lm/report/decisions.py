"""Who serves a product of a layer, and how long it takes."""

from dataclasses import dataclass, replace
from typing import Literal

from mlx_marlin.backends import planner
from mlx_marlin.lm.report.layer_products import LayerProduct, Target
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.gather_plan import (
    AnyPlan,
    AnyProblem,
    GatherPlan,
    GatherProblem,
)
from mlx_marlin.planning.measurement import STOCK, Measured, Result, label
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import serving
from mlx_marlin.products.request import Request
from mlx_marlin.products.serving import Answer, Refusal

Server = Literal["ours", "decoded", "stock", "nobody"]
"""Our kernels; `mx.matmul` after our kernel has decoded the weight; stock MLX; or
nobody, because the call raises an error."""
Origin = Literal["predicted", "measured"]
"""Where a time comes from: the cost model, or a measurement on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """The time of a product."""

    us: float  # Microseconds
    origin: Origin  # Where it comes from
    clock: str | None = None  # What it was measured with; None for predictions

    @property
    def mark(self) -> str:
        """Where the time comes from."""
        return self.origin if self.clock is None else f"{self.origin}, {self.clock}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Who serves a product with some rows."""

    rows: int  # Rows of the activations
    served_by: Server  # Who serves the call
    kernel: str | None  # Our kernel that serves it; None for stock MLX's
    plan: str | None  # The plan of our kernels; None if they do not serve
    time: Time | None  # The time of whoever serves; None without a model of it
    # The time of stock MLX for the weight in MLX's layout, if it was measured
    stock_time: Time | None
    reason: str | None  # Why our kernels do not serve; None if they do
    # Where times in the reason come from; None if it has none
    reason_origin: Origin | None = None


def decide(product: LayerProduct, rows: int, target: Target) -> Decision:
    """Returns who serves a product; its layer must have a quantized weight."""
    if product.choices:
        return _of_experts(product, rows, target)
    request = product.request(rows, target.on_cpu)
    answer = _answer(request, product, target)
    if isinstance(answer, Refusal) and product.parts and request.layout == "marlin":
        # As `layer_parts` does: the parts are then columns of one product.
        whole = replace(product, parts=())
        request = whole.request(rows, target.on_cpu)
        answer = _answer(request, whole, target)
    # There is no model of products with weights that are not transposed.
    found = serving.problem_of(request) if request.transpose else None
    problem = found if isinstance(found, Problem) else None
    measured = target.serving.measured(problem) if problem else None
    timed = None if measured is None else measured.result
    # Stock MLX has to decode packed weights, which is not measured.
    stock = None if timed is None else _of_stock(timed)
    if isinstance(answer, Refusal):
        time = stock if request.layout == "mlx" else None
    else:
        time = _time(answer, timed, target)
    origin = _origin(answer, problem, measured)
    return _decision(rows, answer, request.invariant, time, stock, origin)


def _answer(request: Request, product: LayerProduct, target: Target) -> Answer:
    if product.stays:
        return Refusal(product.stays)
    return serving.serve(request, target.serving)


def _origin(
    answer: Answer, problem: AnyProblem | None, measured: Measured | None
) -> Origin | None:
    """Returns where the times in a reason come from; None if it has none."""
    if not isinstance(answer, Refusal) or answer.cause != "speed" or problem is None:
        return None
    return None if measured is None else "measured"


def _of_experts(product: LayerProduct, rows: int, target: Target) -> Decision:
    packed = product.weight is not None and product.weight.layout == "marlin"
    request = product.request(rows, target.on_cpu, packed)
    answer = _answer(request, product, target)
    measured = stock = ours = problem = None
    if isinstance(found := serving.problem_of(request), GatherProblem):
        problem = found
        measured = target.serving.measured(problem)
        ours, stock = _gather_times(problem, measured, target)
    time = (None if packed else stock) if isinstance(answer, Refusal) else ours
    origin = _origin(answer, problem, measured)
    return _decision(rows, answer, request.invariant, time, stock, origin)


def _gather_times(
    problem: GatherProblem, measured: Measured | None, target: Target
) -> tuple[Time | None, Time | None]:
    """Returns the times of our kernel, measured or predicted, and of stock MLX."""
    backend, device = target.backend, target.device
    result = None if measured is None else measured.result
    if result is not None and result.us is not None:
        return _measured(result, label(result.plan)), _of_stock(result)
    own = backend.seconds(planner.choose_gather(problem, device), device)
    return None if own is None else _predicted(own), None


def _decision(
    rows: int,
    answer: Answer,
    invariant: bool,
    time: Time | None,
    stock: Time | None,
    origin: Origin | None,
) -> Decision:
    if isinstance(answer, Refusal):
        return Decision(
            rows=rows,
            served_by="nobody" if invariant else "stock",
            kernel=None,
            plan=None,
            time=None if invariant else time,
            stock_time=stock,
            reason=answer.reason,
            reason_origin=origin,
        )
    return Decision(
        rows=rows,
        served_by="decoded" if isinstance(answer, DequantizePlan) else "ours",
        kernel=_kernel(answer),
        plan=answer.explain(),
        time=time,
        stock_time=stock,
        reason=None,
    )


def _kernel(plan: AnyPlan) -> str:
    if isinstance(plan, DequantizePlan):
        return "dequantize"
    return "gather" if isinstance(plan, GatherPlan) else plan.kernel


def _of_stock(timed: Result) -> Time | None:
    return _measured(timed, STOCK) if STOCK in timed.medians_us else None


def _time(plan: AnyPlan, timed: Result | None, target: Target) -> Time | None:
    """Returns the time of a plan of ours."""
    if isinstance(plan, DequantizePlan):
        if not plan.transposed:
            return None
        seconds = target.backend.seconds(plan, target.device)
        return None if seconds is None else _predicted(seconds)
    assert isinstance(plan, Plan)
    if timed is not None and plan == timed.plan and timed.us is not None:
        return _measured(timed, label(plan))
    return _predicted(planner.predict(plan, target.device).seconds)


def _predicted(seconds: float) -> Time:
    return Time(us=seconds * 1e6, origin="predicted")


def _measured(timed: Result, name: str) -> Time:
    return Time(us=timed.medians_us[name], origin="measured", clock=timed.clock)
