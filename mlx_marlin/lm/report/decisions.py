"""Who serves a product of a layer, and how long it takes."""

from dataclasses import dataclass, replace
from typing import Literal

from mlx_marlin.backends import planner
from mlx_marlin.lm.report.layer_products import LayerProduct, Target
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.gather_plan import AnyPlan, GatherPlan, GatherProblem
from mlx_marlin.planning.measurement import STOCK, Measured, Result, label
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, in_stock_mlx
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
    kernel: str | None  # The kernel that serves it; None if its name is not known
    plan: str | None  # The plan of our kernels; None if they do not serve
    time: Time | None  # The time of whoever serves; None without a model of it
    # Stock MLX's kernel for the weight in MLX's layout, or None
    stock_kernel: str | None
    stock_time: Time | None  # The time of stock MLX for that, or None
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
    kernel, stock = _stock(problem, timed, target)
    if isinstance(answer, Refusal):
        # Stock MLX has to decode packed weights, for which there is no model.
        time = stock if request.layout == "mlx" else None
    else:
        time = _time(answer, timed, target)
    origin = _origin(answer, problem, measured, target)
    return _decision(rows, answer, request.invariant, time, (kernel, stock), origin)


def _answer(request: Request, product: LayerProduct, target: Target) -> Answer:
    if product.stays:
        return Refusal(product.stays)
    return serving.serve(request, target.serving)


def _origin(
    answer: Answer, problem: Problem | None, measured: Measured | None, target: Target
) -> Origin | None:
    """Returns where the times in a reason come from; None if it has none."""
    if not isinstance(answer, Refusal) or answer.cause != "speed" or problem is None:
        return None
    if measured is not None:
        return "measured"
    # Without a model of stock MLX, rules without times decide.
    has_model = target.backend.stock_seconds(problem, target.device) is not None
    return "predicted" if has_model else None


def _of_experts(product: LayerProduct, rows: int, target: Target) -> Decision:
    packed = product.weight is not None and product.weight.layout == "marlin"
    request = product.request(rows, target.on_cpu, packed)
    answer = _answer(request, product, target)
    measured = stock = ours = None
    if isinstance(problem := serving.problem_of(request), GatherProblem):
        measured = target.serving.measured(problem)
        ours, stock = _gather_times(problem, measured, target)
    refused = isinstance(answer, Refusal)
    origin: Origin | None = None
    if isinstance(answer, Refusal) and answer.cause == "speed":
        origin = "predicted" if measured is None else "measured"
    time = (None if packed else stock) if refused else ours
    return _decision(rows, answer, request.invariant, time, (None, stock), origin)


def _gather_times(
    problem: GatherProblem, measured: Measured | None, target: Target
) -> tuple[Time | None, Time | None]:
    """Returns the times of our kernel and of stock MLX, measured or predicted."""
    backend, device = target.backend, target.device
    result = None if measured is None else measured.result
    if result is not None and result.us is not None:
        stock_time = _measured(result, STOCK) if STOCK in result.medians_us else None
        return _measured(result, label(result.plan)), stock_time
    own = backend.seconds(planner.choose_gather(problem, device), device)
    native = in_stock_mlx(problem.problem)
    if own is None or native is None:
        return None if own is None else _predicted(own), None
    stock = backend.stock_seconds(replace(problem, problem=native), device)
    return _predicted(own), None if stock is None else _predicted(stock)


def _decision(
    rows: int,
    answer: Answer,
    invariant: bool,
    time: Time | None,
    stock: tuple[str | None, Time | None],
    origin: Origin | None,
) -> Decision:
    kernel, stock_time = stock
    if isinstance(answer, Refusal):
        return Decision(
            rows=rows,
            served_by="nobody" if invariant else "stock",
            # The kernel of a call whose time is not known is not known either.
            kernel=None if invariant or time is None else kernel,
            plan=None,
            time=None if invariant else time,
            stock_kernel=kernel,
            stock_time=stock_time,
            reason=answer.reason,
            reason_origin=origin,
        )
    return Decision(
        rows=rows,
        served_by="decoded" if isinstance(answer, DequantizePlan) else "ours",
        kernel=_kernel(answer),
        plan=answer.explain(),
        time=time,
        stock_kernel=kernel,
        stock_time=stock_time,
        reason=None,
    )


def _kernel(plan: AnyPlan) -> str:
    if isinstance(plan, DequantizePlan):
        return "dequantize"
    return "gather" if isinstance(plan, GatherPlan) else plan.kernel


def _stock(
    problem: Problem | None, timed: Result | None, target: Target
) -> tuple[str | None, Time | None]:
    """Returns stock MLX's kernel and its time for a product in MLX's layout."""
    native = None if problem is None else in_stock_mlx(problem)
    if native is None:
        return None, None
    predicted = target.backend.predict_stock(native, target.device)
    kernel = None if predicted is None else predicted.call.kernel
    if timed is not None and STOCK in timed.medians_us:
        return kernel, _measured(timed, STOCK)
    seconds = target.backend.stock_seconds(native, target.device)
    return kernel, None if seconds is None else _predicted(seconds)


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
