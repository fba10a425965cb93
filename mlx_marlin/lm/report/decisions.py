"""Who serves a product of a layer, and how long it takes."""

from dataclasses import dataclass, replace
from typing import Literal

from mlx_marlin.backends import planner
from mlx_marlin.lm.report.layer_uses import LayerUse
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.gather_plan import AnyPlan, GatherPlan
from mlx_marlin.planning.measurement import STOCK, Result, label
from mlx_marlin.planning.plan import Plan
from mlx_marlin.products import serving
from mlx_marlin.products.request import Request
from mlx_marlin.products.serving import Answer, Refusal
from mlx_marlin.tables import Value

Server = Literal["ours", "decoded", "stock", "nobody"]
"""Our kernels; `mx.matmul` after our kernel has decoded the weight; stock MLX; or
nobody, because the call raises an error."""
Origin = Literal["predicted", "measured"]
"""Where a time comes from: the cost model, or a measurement on this machine."""
SERVERS = {
    "ours": "ours",
    "decoded": "ours, decoded once",
    "stock": "stock MLX",
    "nobody": "nobody: raises",
}


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

    def __str__(self) -> str:
        """Returns the time and where it comes from."""
        us = f"{self.us:.1f}" if self.us >= 1 else f"{self.us:.2g}"
        return f"{us} us {self.mark}"


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

    @property
    def marked_reason(self) -> str:
        """The reason, with where its times come from; "" if our kernels serve."""
        origin = f"{self.reason_origin}: " if self.reason_origin else ""
        return origin + self.reason if self.reason else ""


def decide(use: LayerUse, rows: int, place: serving.Place) -> Decision:
    """Returns who serves a product; its layer must have a quantized weight."""
    request = replace(use.at(rows), on_cpu=place.on_cpu)
    answer = _answer(request, use, place)
    if isinstance(answer, Refusal) and request.epilogue.parts and _is_packed(request):
        # As `layer_parts` does: the parts are then columns of one product.
        request = replace(request, epilogue=replace(request.epilogue, parts=()))
        answer = _answer(request, use, place)
    # There is no model of products with weights that are not transposed.
    found = serving.problem_of(request) if request.transpose else None
    problem = None if isinstance(found, Refusal) else found
    measured = place.measured(problem) if problem else None
    timed = None if measured is None else measured.result
    # Stock MLX has to decode packed weights, which is not measured.
    stock = None if timed is None else _of_stock(timed)
    if isinstance(answer, Refusal):
        is_speed = answer.cause == "speed" and measured is not None
        is_raised = request.invariant
        return Decision(
            rows=rows,
            served_by="nobody" if is_raised else "stock",
            kernel=None,
            plan=None,
            time=None if is_raised or _is_packed(request) else stock,
            stock_time=stock,
            reason=answer.reason,
            reason_origin="measured" if is_speed else None,
        )
    return Decision(
        rows=rows,
        served_by="decoded" if isinstance(answer, DequantizePlan) else "ours",
        kernel=_kernel(answer),
        plan=answer.explain(),
        time=_time(answer, timed, place),
        stock_time=stock,
        reason=None,
    )


def _answer(request: Request, use: LayerUse, place: serving.Place) -> Answer:
    return Refusal(use.stays) if use.stays else serving.serve(request, place)


def _is_packed(request: Request) -> bool:
    return request.layout == "marlin"


def _kernel(plan: AnyPlan) -> str:
    if isinstance(plan, DequantizePlan):
        return "dequantize"
    return "gather" if isinstance(plan, GatherPlan) else plan.kernel


def _of_stock(timed: Result) -> Time | None:
    return _measured(timed, STOCK) if STOCK in timed.medians_us else None


def _time(plan: AnyPlan, timed: Result | None, place: serving.Place) -> Time | None:
    """Returns the time of a plan of ours, measured or predicted."""
    if timed is not None and plan == timed.plan and timed.us is not None:
        return _measured(timed, label(plan))
    if isinstance(plan, DequantizePlan) and not plan.transposed:
        return None
    if isinstance(plan, Plan):
        seconds: float | None = planner.predict(plan, place.device).seconds
    else:
        seconds = place.backend.seconds(plan, place.device)
    return None if seconds is None else Time(us=seconds * 1e6, origin="predicted")


def _measured(timed: Result, name: str) -> Time:
    return Time(us=timed.medians_us[name], origin="measured", clock=timed.clock)


def cells(decision: Decision | None, why: str) -> dict[str, Value]:
    """Returns the cells of a report's line; without a decision stock MLX serves.

    `why`: why our kernels do not.
    """
    server, rows, time, stock = SERVERS["stock"], None, None, None
    if decision is not None:
        kernel = f": {decision.kernel}" if decision.kernel else ""
        server, rows = SERVERS[decision.served_by] + kernel, decision.rows
        time, stock = decision.time, decision.stock_time
    return {
        "rows": rows,
        "served by": server,
        "time": "" if time is None else str(time),
        "stock MLX in MLX's layout": "" if stock is None else str(stock),
        "why not ours": why,
    }
