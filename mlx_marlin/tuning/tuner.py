"""Tunes a problem: who is compared, by which clock, and what is kept of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import cycle

from mlx_marlin import guard
from mlx_marlin.backends import launch, planner, selection
from mlx_marlin.backends.launch import Product
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.choice import Candidate
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.measurement import STOCK, Result, label
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import eligibility
from mlx_marlin.tuning import counting, operands, timing
from mlx_marlin.tuning.operands import Operands
from mlx_marlin.tuning.timing import Spread

Arm = Plan | None
"""One of our plans, or None for stock MLX."""
Measure = Callable[[Mapping[Arm, Product], Operands], dict[Arm, Spread]]

BEST = 6
"""Plans that are measured because the model likes them most."""
SECONDS = 2.0
"""Default time for a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How to measure, and what to call it.

    Attributes:
        name: What the times are.
        measure: Takes a time of every arm.
        weights: Weights that are taken in turn.
        times_stock: Whether stock MLX can be measured too.
    """

    name: str
    measure: Measure
    weights: Callable[[Problem], int]
    times_stock: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of tuning a problem.

    Attributes:
        arms: What was measured, the model's answer first.
        wrong: Plans that would have won, had their products been right.
        result: What to keep; None if none of our plans was right.
        failed: Plans that were not measured because their kernels failed the
            guard's check.
    """

    arms: dict[Arm, Spread]
    wrong: tuple[Plan, ...]
    result: Result | None
    failed: tuple[Plan, ...] = ()


def clock(device: PlanningDevice, seconds: float = SECONDS) -> Clock:
    """Returns the clock of the back end that runs here.

    Args:
        device: The device that plans are made for.
        seconds: Time for a problem; counters take what they need.

    Raises:
        ValueError: If no back end runs our kernels here.
    """
    lacking = selection.missing()
    if lacking is not None:
        raise ValueError(f"{lacking}: nothing can be measured")
    backend = selection.backend()
    if backend in selection.ON_GPU:
        return Clock(
            name="wall time",
            measure=partial(wall_time, seconds=seconds),
            weights=lambda problem: operands.rotated(problem, device),
            times_stock=True,
        )
    if backend == "emulator" and isinstance(device, Device):
        return Clock(
            name="emulator counters",
            measure=partial(emulator_counters, device=device),
            weights=lambda _: 1,
            times_stock=False,
        )
    raise ValueError(
        "nothing here runs our kernels, or MLX_MARLIN_BACKEND says stock: there is "
        "nothing to tune"
    )


def why_not(problem: Problem, device: PlanningDevice) -> str | None:
    """Says why a problem cannot be tuned; None if it can.

    Args:
        problem: The product.
        device: The device that plans are made for.
    """
    reason = eligibility.unsupported(problem)
    if reason is not None:
        return reason
    if not selection.may_hand_over():
        return None
    if planner.choose_dense(problem, device) is None:
        return None
    return (
        f"{problem.m} rows are multiplied by the weight decoded once, which no plan is "
        f"compared with"
    )


def shortlist(candidates: Sequence[Candidate], best: int = BEST) -> list[Plan]:
    """Returns the plans worth measuring, in the model's order.

    Args:
        candidates: All that the model compared, its favourite first.
        best: How many of the first to take; of every strategy and kernel its first
            comes too.
    """
    seen: set[str] = set()
    plans = []
    for nth, each in enumerate(candidates):
        kinds = {each.plan.strategy, each.plan.kernel}
        if nth < best or kinds - seen:
            plans.append(each.plan)
        seen |= kinds
    return plans


def arms(problem: Problem, device: PlanningDevice, *, times_stock: bool) -> list[Arm]:
    """Returns what to compare for a problem, the model's answer first.

    Stock MLX is one of them where a product could be handed over to it.

    Args:
        problem: The product.
        device: The device to plan for.
        times_stock: Whether the clock can measure stock MLX.
    """
    choice = planner.compare(problem, device=device)
    plans: list[Arm] = [*shortlist(choice.candidates)]
    plans += planner.experiments(problem, device)
    if not times_stock or problem.layout != "mlx":
        return plans
    return [None, *plans] if choice.reason else [*plans, None]


def tune(problem: Problem, device: PlanningDevice, clock: Clock) -> Outcome:
    """Measures a problem and picks what to use.

    Plans whose kernels fail the guard's check are not measured, and a plan whose
    product is wrong fails it from then on.

    Args:
        problem: The product, without an epilogue.
        device: The device to plan for.
        clock: How to measure.
    """
    given = operands.operands(problem, clock.weights(problem))
    compared = arms(problem, device, times_stock=clock.times_stock)
    failed = tuple(arm for arm in compared if arm is not None and guard.why_not(arm))
    compared = [arm for arm in compared if arm not in failed]
    if not any(compared):
        return Outcome(arms={}, wrong=(), result=None, failed=failed)
    products = {arm: _product(arm, problem) for arm in compared}
    measured = clock.measure(products, given)
    spreads = {arm: measured[arm] for arm in compared}
    plan, wrong = _best_right(spreads, products, given)
    for each in wrong:
        guard.condemn(each, f"its product was wrong in tuning: {problem.explain()}")
    if plan is None:
        return Outcome(arms=spreads, wrong=wrong, result=None, failed=failed)
    finalists = {arm: spread for arm, spread in spreads.items() if arm in (plan, None)}
    result = Result(
        plan=plan,
        stock=timing.winner(finalists) is None,
        medians_us={name(arm): round(spreads[arm].median * 1e6, 4) for arm in compared},
        clock=clock.name,
        date=date.today().isoformat(),
    )
    return Outcome(arms=spreads, wrong=wrong, result=result, failed=failed)


def name(arm: Arm) -> str:
    """Returns what an arm is called."""
    return STOCK if arm is None else label(arm)


def wall_time(
    products: Mapping[Arm, Product], given: Operands, seconds: float
) -> dict[Arm, Spread]:
    """Measures chains of products over weights that no cache holds.

    Args:
        products: By arm.
        given: Their operands.
        seconds: For all of them together.
    """
    weights = cycle(given.weights)
    x = given.x
    # Compiles the kernels, and says how long a chain has to be.
    short = [
        timing.chain(product, x, weights, timing.SHORTEST)
        for product in products.values()
        for _ in range(2)
    ]
    each = seconds / (timing.ROUNDS * len(products))
    length = timing.chain_length(min(short), each)

    def sampled(product: Product) -> timing.Sample:
        return lambda: timing.chain(product, x, weights, length)

    samples = {arm: sampled(product) for arm, product in products.items()}
    return timing.interleaved(samples, seconds=seconds)


def emulator_counters(
    products: Mapping[Arm, Product], given: Operands, device: Device
) -> dict[Arm, Spread]:
    """Counts what one product of each arm does; counters have no noise.

    Args:
        products: By arm.
        given: Their operands.
        device: Whose rates weight the counters.
    """
    from mlx_marlin import emulator

    def seconds(product: Product) -> float:
        launches = emulator.trace(product, given.x, *given.weights[0])
        return counting.counted_seconds(launches, device)

    return {arm: Spread(median=seconds(each)) for arm, each in products.items()}


def _product(arm: Arm, problem: Problem) -> Product:
    return operands.stock_product(problem) if arm is None else launch.product(arm)


def _best_right(
    spreads: Mapping[Arm, Spread], products: Mapping[Arm, Product], given: Operands
) -> tuple[Plan | None, tuple[Plan, ...]]:
    """Returns our best plan whose product is right, and those that would have won."""
    left = {arm: spread for arm, spread in spreads.items() if arm is not None}
    wrong: list[Plan] = []
    while left:
        best = timing.winner(left)
        if operands.is_right(products[best], given):
            return best, tuple(wrong)
        wrong.append(best)
        del left[best]
    return None, tuple(wrong)
