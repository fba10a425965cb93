"""Tunes a problem: chooses the arms and the clock, measures, and picks a plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from mlx_marlin import guard
from mlx_marlin.backends import graph, planner, registry, selection
from mlx_marlin.backends.graph import Product
from mlx_marlin.measure import operands, rows, timing
from mlx_marlin.measure.clocks import Clock
from mlx_marlin.measure.operands import Operands
from mlx_marlin.measure.rows import CANDIDATE, CHAIN, ProductRow
from mlx_marlin.measure.timing import Spread
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.gather_plan import AnyPlan
from mlx_marlin.planning.measurement import (
    STOCK,
    Result,
    label,
    plan_problem,
    product_of,
)
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.search import Candidate

Arm = Plan | None
"""One of our plans, or None for stock MLX."""
BEST = 6
"""Number of the cost model's best plans that are measured."""
Tick = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of tuning a problem."""

    arms: dict[Arm, Spread]  # The measurements, with the cost model's choice first
    wrong: tuple[Plan, ...]  # Plans that would have won, but whose product was wrong
    # The result to store. None if the product of no plan was right, or the times are
    # noise
    result: Result | None
    # Plans that were not measured because their kernels failed the guard's check
    failed: tuple[Plan, ...] = ()

    @property
    def is_noisy(self) -> bool:
        """Whether nothing is kept although a plan was right: the times are noise."""
        is_right = any(arm is not None and arm not in self.wrong for arm in self.arms)
        return is_right and self.result is None

    def rows(self, problem: Problem, clock: Clock) -> list[ProductRow]:
        """Returns the times of stock MLX and of the right plans for a result file."""
        return [
            ProductRow(
                problem=problem,
                arm=rows.STOCK if arm is None else f"{CANDIDATE}: {label(arm)}",
                clock=CHAIN,
                timing=clock.timing(spread),
                plan=arm,
            )
            for arm, spread in self.arms.items()
            if arm not in self.wrong
        ]


def why_not(problem: Problem, device: PlanningDevice) -> str | None:
    """Returns why a problem cannot be tuned, or None if it can."""
    try:
        operands.check(problem)
    except ValueError as error:
        return str(error)
    reason = registry.of_device(device).unsupported(problem, device)
    if reason is not None:
        return reason
    if not selection.may_hand_over():
        return None
    if planner.choose_dequantize(problem, device) is None:
        return None
    return (
        f"{problem.m} rows are multiplied by the weight decoded once, which is not "
        f"compared with other plans"
    )


def shortlist(candidates: Sequence[Candidate], best: int = BEST) -> list[Plan]:
    """Returns the plans to measure, in the order of the cost model."""
    seen: set[str] = set()
    plans = []
    for rank, candidate in enumerate(candidates):
        plan = candidate.plan
        names = {plan.strategy, plan.kernel}
        if rank < best or names - seen:
            plans.append(plan)
        seen |= names
    return plans


def arms(problem: Problem, device: PlanningDevice, *, times_stock: bool) -> list[Arm]:
    """Returns the arms to compare for a problem, with the cost model's choice first.

    Stock MLX is one of them if it can serve the problem.
    """
    choice = planner.compare(problem, device=device)
    plans: list[Arm] = [*shortlist(choice.candidates)]
    plans += planner.experiments(problem, device)
    if not times_stock or problem.layout != "mlx":
        return plans
    return [None, *plans] if choice.reason else [*plans, None]


def tune(
    problem: Problem, device: PlanningDevice, clock: Clock, tick: Tick = lambda: None
) -> Outcome:
    """Measures the arms of a problem and picks the fastest.

    Plans whose kernels fail the guard's check are not measured. A plan whose product is
    wrong is recorded as failed.
    """
    inputs = operands.operands(problem, clock.weights(problem))
    compared = arms(problem, device, times_stock=clock.times_stock)
    plans = [arm for arm in compared if arm is not None]
    failed = tuple(plan for plan in plans if _fails(plan, tick))
    compared = [arm for arm in compared if arm not in failed]
    if not any(compared):
        return Outcome(arms={}, wrong=(), result=None, failed=failed)
    products = {arm: product_of_arm(arm, problem) for arm in compared}
    measured = clock.measure(products, inputs)
    spreads = {arm: measured[arm] for arm in compared}
    tick()
    plan, wrong = _best_right(spreads, products, inputs)
    for wrong_plan in wrong:
        guard.condemn(
            wrong_plan, f"its product was wrong in tuning: {problem.explain()}"
        )
    result = None if plan is None else verdict(plan, spreads, clock.name)
    return Outcome(arms=spreads, wrong=wrong, result=result, failed=failed)


def verdict(
    plan: AnyPlan, spreads: Mapping[Any, Spread], clock: str, is_final: bool = False
) -> Result | None:
    """Returns who serves a problem, or None if the times are noise.

    Stock MLX serves it if the plan is not faster by `timing.DRAW`, unless it would have
    to unpack the weight.
    """
    ours, stock = spreads[plan], spreads.get(None)
    is_noise = ours.is_noisy or (stock is not None and stock.is_noisy)
    if is_noise and not is_final:
        return None
    wins = stock is None or (ours.wins(stock) and not is_noise)
    packed = product_of(plan_problem(plan)).layout == "marlin"
    return Result(
        plan=plan,
        stock=not packed and not wins,
        medians_us={
            name(arm): round(each.median * 1e6, 4) for arm, each in spreads.items()
        },
        clock=clock,
        date=date.today().isoformat(),
    )


def name(arm: AnyPlan | None) -> str:
    """Returns the name of an arm."""
    return STOCK if arm is None else label(arm)


def product_of_arm(arm: Arm, problem: Problem) -> Product:
    """Returns what computes a problem by a plan or by stock MLX."""
    return operands.stock_product(problem) if arm is None else graph.product(arm)


def steps(problem: Problem, device: PlanningDevice, clock: Clock) -> int:
    """Returns the steps of tuning a problem: each plan's check, and measuring all."""
    compared = arms(problem, device, times_stock=clock.times_stock)
    return sum(arm is not None for arm in compared) + 1


def _fails(plan: Plan, tick: Tick) -> bool:
    reason = guard.why_not(plan)
    tick()
    return reason is not None


def _best_right(
    spreads: Mapping[Arm, Spread], products: Mapping[Arm, Product], inputs: Operands
) -> tuple[Plan | None, tuple[Plan, ...]]:
    """Returns the fastest plan whose product is right, and the faster wrong ones."""
    plans = {arm: spread for arm, spread in spreads.items() if arm is not None}
    wrong: list[Plan] = []
    while plans:
        best = timing.winner(plans)
        if operands.is_right(products[best], inputs):
            return best, tuple(wrong)
        wrong.append(best)
        del plans[best]
    return None, tuple(wrong)
