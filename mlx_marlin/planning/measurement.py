"""Measured results of products and models, and the machine they hold for."""

import sys
from dataclasses import dataclass, fields, replace

from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.gather_plan import (
    AnyPlan,
    AnyProblem,
    GatherPlan,
    GatherProblem,
)
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.regular_files import quoted
from mlx_marlin.weights.formats import LAYOUTS

STOCK = "stock MLX"
"""Key of stock MLX among the times."""
PROMPTS = (256, 512, 1024, 2048)
"""Rows of prompts that the race times. If it has, its verdict at the most rows holds
for more."""
MOST_TRIES, TRIED, WAITED = 30, 10, 1
"""What is left is not measured any more after so many tries. A load is `TRIED` of them,
or `WAITED` if processes still compile MLX's own kernels at its end: such a process may
be ended before it is done, again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that a measured time depends on besides the problem and the plan."""

    chip: str  # The device that runs the kernels. The emulator has a name of its own
    architecture: str  # GPU architecture, by which MLX chooses its kernels
    cores: int  # GPU cores
    system: str  # Operating system and its version
    mlx: str  # Version of MLX
    kernels: str  # Digest of the shaders and of the fields of a plan

    @property
    def file_name(self) -> str:
        """Name of the machine's result file: readable and unique."""
        import hashlib
        import re

        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        chip = re.sub(r"[^a-z0-9]+", "-", self.chip.lower()).strip("-")
        return f"{chip}-{self.cores}-cores-{digest}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The measured result for one problem."""

    plan: AnyPlan  # The fastest plan, whose product was checked
    stock: bool  # Whether stock MLX serves the problem: it was faster, or as fast
    # Median times in microseconds, by `label` or `STOCK`; empty if the problem was
    # measured as part of a model only
    medians_us: dict[str, float]
    clock: str  # Source of the times: "wall time" or "cost model"
    date: str  # Date of the measurement, ISO 8601
    # Whether stock MLX serves it because a model with as many rows was slower with our
    # kernels, whatever the times of single products
    live: bool = False

    def __post_init__(self) -> None:
        needed = () if self.live else (label(self.plan), *[STOCK] * self.stock)
        for name in needed:
            if name not in self.medians_us:
                raise ValueError(f"medians_us has no time for {name!r}")
        for name, time in self.medians_us.items():
            if not is_positive(time):
                raise ValueError(f"medians_us of {name!r} is {time!r}, expected a time")
        if product_of(self.problem).invariant:
            raise ValueError("invariant=True: bits that are promised are not measured")
        if self.live and not self.stock:
            raise ValueError("live=True with stock=False, expected stock=True")
        if isinstance(self.plan, Plan):
            _check_plan(self.plan)

    @property
    def problem(self) -> AnyProblem:
        """The problem that was measured."""
        return plan_problem(self.plan)

    @property
    def us(self) -> float | None:
        """Microseconds of our plan, or None if it was not timed alone."""
        return self.medians_us.get(label(self.plan))

    @property
    def reason(self) -> str | None:
        """Why stock MLX should serve the problem; None if our plan does."""
        if not self.stock:
            return None
        if self.live:
            return "measured here: the whole model was slower with our kernels"
        stock, ours = self.medians_us[STOCK], self.medians_us[label(self.plan)]
        text = f"measured here: stock MLX took {stock:.1f} us, our best {ours:.1f} us"
        return f"{text}, which counts as equal" if ours < stock else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What measurements say about a problem, which need not be one of those
    measured."""

    reason: str | None  # Why stock MLX serves it; None if our kernels do
    # The plan that was fastest; None if the cost model chooses it
    plan: AnyPlan | None = None
    result: Result | None = None  # The result of this very problem, or None
    # Whether the weight is decoded first; None if the cost model decides
    decodes: bool | None = None

    @staticmethod
    def of(result: Result, problem: AnyProblem) -> "Measured":
        """Returns what a result says of its problem, or of one with an epilogue.

        Gated, rotated and normalized products have plans of their own.
        """
        plan = result.plan
        if result.problem != problem:
            if isinstance(plan, GatherPlan) or isinstance(problem, GatherProblem):
                return Measured(reason=result.reason)
            if problem.epilogue.is_paired or problem.norm is not None:
                return Measured(reason=result.reason)
            plan = replace(plan, problem=problem)
        return Measured(
            reason=result.reason, plan=plan, result=replace(result, plan=plan)
        )

    @staticmethod
    def between(lower: Result, upper: Result) -> "Measured":
        """Returns what is assumed between two measured numbers of rows.

        Our kernels serve only if they serve at both.
        """
        slower = next((each for each in (lower, upper) if each.stock), None)
        if slower is None:
            ways = {isinstance(each.plan, DequantizePlan) for each in (lower, upper)}
            return Measured(reason=None, decodes=ways.pop() if len(ways) == 1 else None)
        return Measured(
            reason=f"measured here at {product_of(lower.problem).m} and "
            f"{product_of(upper.problem).m} rows: stock MLX serves "
            f"{product_of(slower.problem).m}"
        )

    @staticmethod
    def beyond(most: Result) -> "Measured":
        """Returns what is assumed of more rows than the most that were measured."""
        if not most.stock:
            return Measured(reason=None, decodes=isinstance(most.plan, DequantizePlan))
        rows = product_of(most.problem).m
        return Measured(
            reason=f"measured here up to {rows} rows: stock MLX serves {rows} and more"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwards:
    """The measured times of a whole model's forward passes, with a short cache."""

    key: str  # Digest of the model's shape and of the options of `optimize`
    layout: str  # The layout of the weights that was faster, or was asked for
    # Rows -> seconds with stock MLX and with our kernels
    seconds: dict[int, tuple[float, float]]
    date: str  # Date of the measurement, ISO 8601
    invariant: bool = False  # Whether our kernels serve whatever they cost
    # Whether packed weights, whose products were faster, made the model slower
    packed_lost: bool = False
    # How often something was left to measure at a later load, in the unit of
    # `MOST_TRIES`
    tries: int = 0

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={quoted(self.layout, 60)}, expected {LAYOUTS}")
        for rows, pair in self.seconds.items():
            if type(rows) is not int or rows < 1 or len(pair) != 2:
                raise ValueError(f"seconds[{rows!r}]={pair!r}, expected two times")
            if not all(type(each) is float and is_positive(each) for each in pair):
                raise ValueError(f"seconds[{rows}]={pair!r}, expected two times")

    @property
    def is_given_up(self) -> bool:
        """Whether what is left is not measured any more: stock MLX serves it."""
        return self.tries >= MOST_TRIES

    @property
    def slower(self) -> tuple[int, ...]:
        """The numbers of rows with which the model was slower with our kernels."""
        return tuple(m for m, (stock, ours) in self.seconds.items() if ours > stock)

    @property
    def stock_rows(self) -> tuple[int, ...]:
        """The rows that stock MLX serves, as it was faster and can read the weights."""
        return self.slower if self.layout == "mlx" and not self.invariant else ()

    @property
    def served(self) -> dict[int, float]:
        """Rows -> seconds of a forward pass by whom it is served."""
        stock = self.stock_rows
        return {m: pair[m not in stock] for m, pair in self.seconds.items()}


def is_positive(value: object) -> bool:
    """Returns whether a value is a positive number that a float can be."""
    # Integers of JSON can be larger than any float.
    return type(value) in (int, float) and 0 < value <= sys.float_info.max  # type: ignore[operator]


def _check_plan(plan: Plan) -> None:
    if plan.reduction == "atomic":
        raise ValueError("reduction='atomic': bits that are promised are not measured")
    work = plan.work
    if work.threadgroups > work.total:
        raise ValueError(
            f"threadgroups={work.threadgroups} is more than {work.total}, the k tiles "
            f"of all tiles"
        )


def plan_problem(plan: AnyPlan) -> AnyProblem:
    """Returns the problem that a plan computes."""
    return plan.gather if isinstance(plan, GatherPlan) else plan.problem


def product_of(problem: AnyProblem) -> Problem:
    """Returns the product of a problem; of experts, that of all pairs."""
    return problem.problem if isinstance(problem, GatherProblem) else problem


def with_rows(problem: AnyProblem, m: int) -> AnyProblem:
    """Returns a problem with m rows; of experts, with m pairs."""
    if isinstance(problem, GatherProblem):
        return replace(problem, problem=replace(problem.problem, m=m))
    return replace(problem, m=m)


def family(problem: AnyProblem) -> tuple[AnyProblem, int]:
    """Returns what a problem has in common with others, and its rows or pairs."""
    if isinstance(problem, GatherProblem):
        # From some pairs on they are sorted, and each has a row of its own.
        problem = replace(problem, is_sorted=False, pairs_per_row=0)
    return with_rows(problem, 1), product_of(problem).m


def plain(problem: AnyProblem) -> AnyProblem:
    """Returns the product that is measured for a problem: without an epilogue."""
    if isinstance(problem, GatherProblem):
        return replace(problem, gate=None, bias=False)
    return replace(problem, epilogue=PLAIN, norm=None)


def label(plan: AnyPlan) -> str:
    """Returns a short name of a plan that is unique among those of its problem."""
    if not isinstance(plan, Plan):
        return plan.explain()
    work = plan.work
    implied = ("strategy", "tiles", "k_tiles")
    details = [
        f"{field.name}={getattr(work, field.name)}"
        for field in fields(work)
        if field.init
        and field.name not in implied
        and getattr(work, field.name) != field.default
    ]
    return f"{work.strategy} {' '.join(details)}, {plan.variant}"


def differences(before: Machine, now: Machine) -> str:
    """Returns how two machines differ, in words; "" if they do not."""
    return ", ".join(
        f"measured with {each.name} {getattr(before, each.name)}, here "
        f"{getattr(now, each.name)}"
        for each in fields(Machine)
        if getattr(before, each.name) != getattr(now, each.name)
    )
