"""Measured results of tuning, the machine they hold for, and their JSON form."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from math import inf
from types import NoneType
from typing import Any, get_args, get_origin

from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.plan import Plan

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
        stock: Whether stock MLX was faster.
        medians_us: Median times in microseconds, by `label` or `STOCK`.
        clock: Source of the times: "wall time" or "emulator counters".
        date: Date of the measurement, ISO 8601.
    """

    plan: Plan
    stock: bool
    medians_us: dict[str, float]
    clock: str
    date: str

    def __post_init__(self) -> None:
        for name in (label(self.plan), *[STOCK] * self.stock):
            if name not in self.medians_us:
                raise ValueError(f"medians_us has no time for {name!r}")
        for name, time in self.medians_us.items():
            if type(time) not in (int, float) or not 0 < time < inf:
                raise ValueError(f"medians_us of {name!r} is {time!r}, expected a time")
        if self.plan.reduction == "atomic" or self.plan.problem.invariant:
            raise ValueError(
                f"reduction={self.plan.reduction!r} with invariant="
                f"{self.plan.problem.invariant}: bits that are promised are not tuned"
            )
        work = self.plan.work
        if work.threadgroups > work.total:
            raise ValueError(
                f"threadgroups={work.threadgroups} is more than {work.total}, the k "
                f"tiles of all tiles"
            )

    @property
    def reason(self) -> str | None:
        """Why stock MLX should serve the problem; None if our plan does."""
        if not self.stock:
            return None
        stock, ours = self.medians_us[STOCK], self.medians_us[label(self.plan)]
        return f"measured here: stock MLX took {stock:.1f} us, our best {ours:.1f} us"


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


def label(plan: Plan) -> str:
    """Returns a short name of a plan that is unique among those of its problem."""
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
    plan = encoded(result.plan)
    return {
        "problem": plan.pop("problem"),
        "served_by": SERVED_BY[result.stock],
        "plan": plan,
        "medians_us": result.medians_us,
        "clock": result.clock,
        "date": result.date,
    }


def result(row: Any, plan_type: Callable[[str], type[Plan]]) -> Result:
    """Returns the result that a row encodes.

    Args:
        row: A value of `row`, decoded from JSON.
        plan_type: Returns the plan type of a kernel's name.

    Raises:
        DECODE_ERRORS: If the row does not encode a result.
    """
    type_ = plan_type(row["plan"]["kernel"])
    plan = decoded(type_, {"problem": row["problem"], **row["plan"]})
    times, served_by = row["medians_us"], row["served_by"]
    if served_by not in SERVED_BY or not isinstance(times, dict):
        raise ValueError(f"served_by={served_by!r} or medians_us={times!r} is not one")
    return Result(
        plan=plan,
        stock=served_by == "stock",
        medians_us=times,
        clock=decoded(str, row["clock"]),
        date=decoded(str, row["date"]),
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
