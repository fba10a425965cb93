"""What was measured for a problem, on what machine: values, and their form as JSON."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from math import inf
from types import NoneType
from typing import Any, get_args, get_origin

from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.plan import Plan

STOCK = "stock MLX"
"""What stock MLX is called among the times."""
SERVED_BY = ("ours", "stock")
DECODE_ERRORS = (ValueError, TypeError, KeyError, ArithmeticError)
"""What reading a row can raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All that a measured time depends on, beside the problem and the plan.

    Attributes:
        chip: What runs the kernels; the emulator is none of the chips.
        architecture: What MLX chooses its own kernels for.
        cores: GPU cores.
        system: The operating system and its version.
        mlx: MLX's version.
        kernels: Digest of the shaders and of what a plan is made of.
    """

    chip: str
    architecture: str
    cores: int
    system: str
    mlx: str
    kernels: str

    @property
    def file_name(self) -> str:
        """Name of the machine's file: readable, and different for any other."""
        import hashlib
        import re

        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        chip = re.sub(r"[^a-z0-9]+", "-", self.chip.lower()).strip("-")
        return f"{chip}-{self.cores}-cores-{digest}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was measured for one problem.

    Attributes:
        plan: The best of our plans, whose product was checked.
        stock: Whether stock MLX beat it.
        medians_us: Median time in microseconds of all that was compared, by `label`.
        clock: What the times are: "wall time" or "emulator counters".
        date: Of the measurement, as in ISO 8601.
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
    """Returns the machine that a device and a back end are.

    Args:
        device: The device that plans are made for.
        backend: "metal", "cuda" or "emulator": counters are never a device's times.
        system: As in `Machine`, and the two below.
        mlx: MLX's version.
        kernels: Digest.
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
    """Names a plan among those of its problem, in a few words."""
    work = plan.work
    implied = ("strategy", "tiles", "k_tiles")
    said = [
        f"{field.name}={getattr(work, field.name)}"
        for field in fields(work)
        if field.init
        and field.name not in implied
        and getattr(work, field.name) != field.default
    ]
    return f"{work.strategy} {' '.join(said)}, {plan.variant}"


def row(result: Result) -> dict[str, Any]:
    """Returns a result as values that JSON can hold."""
    plan = _given(result.plan)
    return {
        "problem": plan.pop("problem"),
        "served_by": SERVED_BY[result.stock],
        "plan": plan,
        "medians_us": result.medians_us,
        "clock": result.clock,
        "date": result.date,
    }


def result(row: Any, plan_type: Callable[[str], type[Plan]]) -> Result:
    """Returns what a row holds.

    Args:
        row: As `row` made it, out of JSON.
        plan_type: Returns the type of the plans that name a kernel.

    Raises:
        NONSENSE: If it is not a result.
    """
    kind = plan_type(row["plan"]["kernel"])
    plan = _built(kind, {"problem": row["problem"], **row["plan"]})
    times, served_by = row["medians_us"], row["served_by"]
    if served_by not in SERVED_BY or not isinstance(times, dict):
        raise ValueError(f"served_by={served_by!r} or medians_us={times!r} is not one")
    return Result(
        plan=plan,
        stock=served_by == "stock",
        medians_us=times,
        clock=_built(str, row["clock"]),
        date=_built(str, row["date"]),
    )


def machine_row(machine: Machine) -> dict[str, Any]:
    """Returns a machine as values that JSON can hold."""
    return asdict(machine)


def machine_of(row: Any) -> Machine:
    """Returns the machine that a row holds.

    Raises:
        NONSENSE: If it is not a machine.
    """
    found: Machine = _built(Machine, row)
    return found


def _given(value: Any) -> Any:
    """Returns what a value was built from."""
    if isinstance(value, tuple):
        return [*map(_given, value)]
    if not is_dataclass(value):
        return value
    given = [each.name for each in fields(value) if each.init]
    return {name: _given(getattr(value, name)) for name in given}


def _built(kind: Any, data: Any) -> Any:
    """Returns a value of a class, or of a field's type, from what JSON holds."""
    if is_dataclass(kind):
        types = {each.name: each.type for each in fields(kind) if each.init}
        if not isinstance(data, dict) or data.keys() != types.keys():
            raise ValueError(f"{data!r} has not the fields {', '.join(types)}")
        build: Any = kind
        return build(**{name: _built(types[name], data[name]) for name in types})
    if get_origin(kind) is tuple and isinstance(data, list):
        return tuple(_built(get_args(kind)[0], each) for each in data)
    if NoneType in get_args(kind):
        (kind,) = {*get_args(kind)} - {NoneType}
        return None if data is None else _built(kind, data)
    # The other types are names to choose from: the classes know which.
    expected = kind if kind in (int, bool, float) else str
    if type(data) is not expected:
        raise ValueError(f"{data!r} is not {expected.__name__}")
    return data
