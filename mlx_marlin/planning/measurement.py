"""Measured results of products, the machine they hold for, and their JSON form."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from math import inf
from types import NoneType
from typing import Any, get_args, get_origin

from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.epilogue import PLAIN
from mlx_marlin.planning.gather_plan import GatherPlan, GatherProblem
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.verdict import AnyPlan

AnyProblem = Problem | GatherProblem
STOCK = "stock MLX"
"""Key of stock MLX among the times."""
SERVED_BY = ("ours", "stock")
DECODE_ERRORS = (ValueError, TypeError, KeyError, ArithmeticError)
"""Errors that decoding a JSON row may raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that a measured time depends on besides the problem and the plan.

    Attributes:
        chip: The device that runs the kernels. The emulator has a name of its own.
        architecture: GPU architecture, by which MLX chooses its kernels.
        cores: GPU cores.
        system: Operating system and its version.
        mlx: Version of MLX.
        kernels: Digest of the shaders and of the fields of a plan.
    """

    chip: str
    architecture: str
    cores: int
    system: str
    mlx: str
    kernels: str

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
    """The measured result for one problem.

    Attributes:
        plan: The fastest plan, whose product was checked.
        stock: Whether stock MLX serves the problem: it was faster, or as fast.
        medians_us: Median times in microseconds, by `label` or `STOCK`; empty if the
            problem was measured as part of a model only.
        clock: Source of the times: "wall time" or "emulator counters".
        date: Date of the measurement, ISO 8601.
        live: Whether stock MLX serves it because a model with as many rows was slower
            with our kernels, whatever the times of single products.
    """

    plan: AnyPlan
    stock: bool
    medians_us: dict[str, float]
    clock: str
    date: str
    live: bool = False

    def __post_init__(self) -> None:
        needed = () if self.live else (label(self.plan), *[STOCK] * self.stock)
        for name in needed:
            if name not in self.medians_us:
                raise ValueError(f"medians_us has no time for {name!r}")
        for name, time in self.medians_us.items():
            if type(time) not in (int, float) or not 0 < time < inf:
                raise ValueError(f"medians_us of {name!r} is {time!r}, expected a time")
        if product_of(self.problem).invariant:
            raise ValueError("invariant=True: bits that are promised are not tuned")
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
        return f"measured here: stock MLX took {stock:.1f} us, our best {ours:.1f} us"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What measurements say about a problem, which need not be one of those measured.

    Attributes:
        reason: Why stock MLX serves it; None if our kernels do.
        plan: The plan that was fastest; None if the cost model chooses it.
        result: The result of this very problem, or None.
    """

    reason: str | None
    plan: AnyPlan | None = None
    result: Result | None = None

    @staticmethod
    def of(result: Result, problem: AnyProblem) -> "Measured":
        """Returns what a result says of its problem, or of one with an epilogue.

        Gated, rotated and normalized products have plans of their own.
        """
        plan = result.plan
        if result.problem != problem:
            if not (isinstance(plan, Plan) and isinstance(problem, Problem)):
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
            return Measured(reason=None)
        return Measured(
            reason=f"measured here at {product_of(lower.problem).m} and "
            f"{product_of(upper.problem).m} rows: stock MLX serves "
            f"{product_of(slower.problem).m}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwards:
    """The measured times of a whole model's forward passes, with a short cache.

    Attributes:
        key: Digest of the model's shape and of the options of `optimize`.
        layout: The layout of the weights that was faster, or was asked for.
        seconds: Rows -> seconds with stock MLX and with our kernels.
        date: Date of the measurement, ISO 8601.
        invariant: Whether our kernels serve whatever they cost.
        packed_lost: Whether packed weights, whose products were faster, made the model
            slower.
    """

    key: str
    layout: str
    seconds: dict[int, tuple[float, float]]
    date: str
    invariant: bool = False
    packed_lost: bool = False

    def __post_init__(self) -> None:
        for rows, pair in self.seconds.items():
            if type(rows) is not int or rows < 1 or len(pair) != 2:
                raise ValueError(f"seconds[{rows!r}]={pair!r}, expected two times")
            if not all(type(each) is float and 0 < each < inf for each in pair):
                raise ValueError(f"seconds[{rows}]={pair!r}, expected two times")

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


def _check_plan(plan: Plan) -> None:
    if plan.reduction == "atomic":
        raise ValueError("reduction='atomic': bits that are promised are not tuned")
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


def machine(
    device: PlanningDevice, *, backend: str, system: str, mlx: str, kernels: str
) -> Machine:
    """Returns the machine that results of a device and a back end hold for.

    Args:
        device: The device that plans are made for.
        backend: "metal", "cuda" or "emulator".
        system: As in `Machine`, and so are the arguments below.
        mlx: Version of MLX.
        kernels: Digest of shaders and plan fields.
    """
    emulated = backend == "emulator"
    return Machine(
        chip=f"emulator for {device.name}" if emulated else device.name,
        architecture=device.arch,
        cores=device.cores,
        system=system,
        mlx=mlx,
        kernels=kernels,
    )


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


def row(result: Result) -> dict[str, Any]:
    """Returns a result as JSON-serializable values."""
    return {
        "type": type(result.plan).__name__,
        "backend": result.plan.backend,
        "plan": encoded(result.plan),
        "served_by": SERVED_BY[result.stock],
        "live": result.live,
        "medians_us": result.medians_us,
        "clock": result.clock,
        "date": result.date,
    }


def result(row: Any, plan_type: Callable[[str, str], type]) -> Result:
    """Returns the result that a row encodes.

    Args:
        row: A value of `row`, decoded from JSON.
        plan_type: Returns the plan type of a back end with a name.

    Raises:
        DECODE_ERRORS: If the row does not encode a result.
    """
    type_ = plan_type(str(row["backend"]), str(row["type"]))
    times, served_by = row["medians_us"], row["served_by"]
    if served_by not in SERVED_BY or not isinstance(times, dict):
        raise ValueError(f"served_by={served_by!r} or medians_us={times!r} is not one")
    return Result(
        plan=decoded(type_, row["plan"]),
        stock=served_by == "stock",
        medians_us=times,
        clock=decoded(str, row["clock"]),
        date=decoded(str, row["date"]),
        live=decoded(bool, row["live"]),
    )


def forwards_row(forwards: Forwards) -> dict[str, Any]:
    """Returns the times of a model as JSON-serializable values."""
    return asdict(forwards)


def forwards_of(row: Any) -> Forwards:
    """Returns the times of a model that a row encodes.

    Raises:
        DECODE_ERRORS: If the row does not encode them.
    """
    seconds = {int(rows): (*pair,) for rows, pair in row["seconds"].items()}
    return Forwards(
        key=decoded(str, row["key"]),
        layout=decoded(str, row["layout"]),
        seconds=seconds,
        date=decoded(str, row["date"]),
        invariant=decoded(bool, row["invariant"]),
        packed_lost=decoded(bool, row["packed_lost"]),
    )


def machine_row(machine: Machine) -> dict[str, Any]:
    """Returns a machine as JSON-serializable values."""
    return asdict(machine)


def machine_of(row: Any) -> Machine:
    """Returns the machine that a row encodes.

    Raises:
        DECODE_ERRORS: If the row does not encode a machine.
    """
    found: Machine = decoded(Machine, row)
    return found


def differences(before: Machine, now: Machine) -> str:
    """Returns how two machines differ, in words; "" if they do not."""
    return ", ".join(
        f"measured with {each.name} {getattr(before, each.name)}, here "
        f"{getattr(now, each.name)}"
        for each in fields(Machine)
        if getattr(before, each.name) != getattr(now, each.name)
    )


def encoded(value: Any) -> Any:
    """Returns a dataclass as a dict of its init fields, a tuple as a list.

    Args:
        value: A dataclass, or a value of a field.
    """
    if isinstance(value, tuple):
        return [*map(encoded, value)]
    if not is_dataclass(value):
        return value
    names = [field.name for field in fields(value) if field.init]
    return {name: encoded(getattr(value, name)) for name in names}


def decoded(type_: Any, data: Any) -> Any:
    """Returns the value of a dataclass, or of a field's type, that `data` encodes.

    Args:
        type_: A dataclass, or the type of a field.
        data: A value of `encoded`, read from JSON.

    Raises:
        DECODE_ERRORS: If `data` does not encode such a value.
    """
    if is_dataclass(type_):
        types = {field.name: field.type for field in fields(type_) if field.init}
        if not isinstance(data, dict) or data.keys() != types.keys():
            raise ValueError(f"{data!r} has not the fields {', '.join(types)}")
        build: Any = type_
        return build(**{name: decoded(types[name], data[name]) for name in types})
    if get_origin(type_) is tuple and isinstance(data, list):
        return tuple(decoded(get_args(type_)[0], item) for item in data)
    if NoneType in get_args(type_):
        (type_,) = {*get_args(type_)} - {NoneType}
        return None if data is None else decoded(type_, data)
    # All other types are literal strings, which the dataclass checks.
    expected = type_ if type_ in (int, bool, float) else str
    if type(data) is not expected:
        raise ValueError(f"{data!r} is not {expected.__name__}")
    return data
