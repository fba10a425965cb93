"""The JSON form of measured results and of the machine that they hold for.

What does not encode a value leads to an error of any type: decode in
`regular_files.decoding`.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin

from mlx_marlin.planning.measurement import Result
from mlx_marlin.regular_files import quoted

SERVED_BY = ("ours", "stock")


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

    `plan_type` returns the plan type of a back end with a name.
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


def encoded(value: Any) -> Any:
    """Returns a dataclass as a dict of its init fields, a tuple as a list."""
    if isinstance(value, tuple):
        return [*map(encoded, value)]
    if not is_dataclass(value):
        return value
    names = [field.name for field in fields(value) if field.init]
    return {name: encoded(getattr(value, name)) for name in names}


def decoded(type_: Any, data: Any) -> Any:
    """Returns the value of a dataclass, or of a field's type, that `data` encodes."""
    if is_dataclass(type_):
        types = {field.name: field.type for field in fields(type_) if field.init}
        if not isinstance(data, dict) or data.keys() != types.keys():
            names = ", ".join(types)
            raise ValueError(f"{quoted(data, 60)} has not the fields {names}")
        build: Any = type_
        return build(**{name: decoded(types[name], data[name]) for name in types})
    if get_origin(type_) is tuple and isinstance(data, list):
        return tuple(decoded(get_args(type_)[0], item) for item in data)
    if get_origin(type_) is dict and isinstance(data, dict):
        key, each = get_args(type_)
        return {key(name): decoded(each, value) for name, value in data.items()}
    if NoneType in get_args(type_):
        (type_,) = {*get_args(type_)} - {NoneType}
        return None if data is None else decoded(type_, data)
    # All other types are literal strings, which the dataclass checks.
    expected = type_ if type_ in (int, bool, float) else str
    if type(data) is not expected:
        raise ValueError(f"{quoted(data, 100)} is not {expected.__name__}")
    return data
