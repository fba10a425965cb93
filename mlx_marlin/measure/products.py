"""Times a product with our kernels, `mx.quantized_matmul`, and dequantizing first."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_marlin import guard
from mlx_marlin.backends import graph, planner, registry
from mlx_marlin.backends.graph import Product
from mlx_marlin.measure import operands
from mlx_marlin.measure.clocks import Clock
from mlx_marlin.measure.operands import Operands
from mlx_marlin.measure.rows import (
    CLOCKS,
    DEQUANTIZED,
    OURS,
    STOCK,
    ProductRow,
    Timing,
)
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.explicit import STAGED, PlanOverrides
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import serving, this_machine
from mlx_marlin.weights.formats import LAYOUTS

DRIFT = 0.05
"""Drift of an arm that is worth a note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to compute a product."""

    name: str  # As in `ProductRow.arm`
    problem: Problem  # The product, with the layout of the arm's weight
    # Takes x, the weight in MLX's layout, and a packed one if there is one
    product: Product
    plan: Plan | None = None  # The plan of a kernel of ours, or None
    handover: str | None = None  # Why stock MLX would serve the call, or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Times of a product."""

    rows: list[ProductRow]  # The times
    faults: list[str]  # What was left out because it is wrong or failed its check
    notes: list[str]  # What is doubtful


def check(problem: Problem) -> None:
    """Checks that stock MLX has a problem's format and our kernels support it."""
    if problem.format.codes not in ("affine", "floating"):
        raise ValueError(
            f"mode={problem.mode!r} is not a mode of mx.quantized_matmul, with which "
            f"our kernels are compared"
        )
    operands.check(problem)
    target = this_machine.device()
    reason = registry.of_device(target).unsupported(problem, target)
    if reason is not None:
        raise ValueError(reason)


def measure(
    problem: Problem,
    device: PlanningDevice,
    clock: Clock,
    layouts: Sequence[str],
    *,
    staged: bool = False,
) -> Measured:
    """Times a product in all ways, in chains and independently.

    Arms whose product is wrong, or whose kernels fail the guard's check, are not timed.
    """
    native = replace(problem, layout="mlx")
    arms = [_ours(replace(problem, layout=layout), device) for layout in layouts]
    if staged:
        arms += _experiments(replace(problem, layout=layouts[0]), device)
    read = LAYOUTS if "marlin" in layouts else LAYOUTS[:1]
    inputs = operands.operands(native, clock.weights(native), read)
    reasons = [_fault(arm, inputs) for arm in arms]
    checked = [*zip(arms, reasons, strict=True)]
    usable = [arm for arm, reason in checked if reason is None]
    faults = [f"{_label(arm)} is left out: {why}" for arm, why in checked if why]
    every = [*usable, _quantized(native), _dequantized(native)]
    timed = [arm for arm in every if arm.plan or clock.times_stock]
    products = {_key(arm): arm.product for arm in timed}
    clocks = zip(CLOCKS, (clock.measure, clock.measure_independent), strict=True)
    rows = []
    for name, measured in clocks:
        spreads = measured(products, inputs) if products else {}
        rows += [_row(arm, name, clock.timing(spreads[_key(arm)])) for arm in timed]
    return Measured(rows=rows, faults=faults, notes=_drifts(rows))


def _ours(problem: Problem, device: PlanningDevice) -> Arm:
    """Returns what our package runs for a product if stock MLX does not serve it."""
    served = serving.serve_problem(problem, serving.here())
    if isinstance(served, DequantizePlan):
        return _arm(OURS, problem, graph.dequantized_product(served))
    if isinstance(served, Plan):
        return _of_plan(OURS, served, None)
    return _of_plan(OURS, planner.choose(problem, device), str(served))


def _experiments(problem: Problem, device: PlanningDevice) -> list[Arm]:
    overrides = [PlanOverrides(kernel="gemm_register")]
    overrides += [
        PlanOverrides(kernel="gemm_staged", buffers=buffers, loaders=loaders)
        for buffers, loaders in STAGED
    ]
    plans = [planner.make(problem, device=device, **given) for given in overrides]
    with suppress(ValueError):  # there are no tensor units for this product
        plans.append(planner.make(problem, device=device, kernel="gemm_tensor"))
    return [_of_plan(_staging(plan), plan) for plan in plans]


def _staging(plan: Plan) -> str:
    if not plan.buffers:
        return plan.kernel
    buffers = f"{plan.buffers} buffer{'s' * (plan.buffers > 1)}"
    loaders = f"{plan.loaders} loader{'s' * (plan.loaders > 1)}"
    return f"{plan.kernel}, {buffers}" + f", {loaders}" * (plan.loaders > 0)


def _of_plan(name: str, plan: Plan, handover: str | None = None) -> Arm:
    return _arm(name, plan.problem, graph.product(plan), plan, handover)


def _arm(
    name: str,
    problem: Problem,
    product: Product,
    plan: Plan | None = None,
    handover: str | None = None,
) -> Arm:
    read = operands.reading(LAYOUTS.index(problem.layout), product)
    return Arm(name=name, problem=problem, product=read, plan=plan, handover=handover)


def _quantized(problem: Problem) -> Arm:
    return _arm(STOCK, problem, operands.stock_product(problem))


def _dequantized(problem: Problem) -> Arm:
    def product(x: mx.array, *weight: mx.array) -> mx.array:
        return x @ operands.stock_weight(problem, *weight).astype(x.dtype).T

    return _arm(DEQUANTIZED, problem, product)


def _fault(arm: Arm, inputs: Operands) -> str | None:
    """Returns why an arm of ours is not timed, or None."""
    reason = None if arm.plan is None else guard.why_not(arm.plan)
    if reason is None and not operands.is_right(arm.product, inputs):
        return "its product is wrong; please report it"
    return reason


def _key(arm: Arm) -> Plan | tuple[str, str]:
    return arm.plan or (arm.name, arm.problem.layout)


def _label(arm: Arm) -> str:
    return f"{arm.name} ({arm.problem.layout} layout) for {arm.problem.explain()}"


def _row(arm: Arm, clock: str, timing: Timing) -> ProductRow:
    return ProductRow(
        problem=arm.problem,
        arm=arm.name,
        clock=clock,
        timing=timing,
        plan=arm.plan,
        handover=arm.handover,
    )


def _drifts(rows: Sequence[ProductRow]) -> list[str]:
    return [
        f"{row.arm} drifted by {row.timing.drift:+.0%} during the measurement of "
        f"{row.problem.explain()} ({row.clock}): the chip may have warmed up or been "
        f"busy"
        for row in rows
        if abs(row.timing.drift) > DRIFT
    ]
