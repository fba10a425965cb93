"""Rows of a benchmark as JSON objects, and JSON values as dataclasses."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from math import inf
from types import NoneType
from typing import Any, get_args, get_origin

from mlx_marlin.backends import registry
from mlx_marlin.measure.privacy import as_name, redacted
from mlx_marlin.measure.rows import (
    CLOCKS,
    METHODS,
    GenerationRow,
    ProductRow,
    Timing,
)
from mlx_marlin.planning import measurement_json
from mlx_marlin.planning.measurement_json import encoded
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.regular_files import quoted

PROBLEM = ("m", "n", "k", "mode", "bits", "group_size", "dtype", "layout")
"""Fields of a problem in a file."""
RATES = ("prompt_tokens_per_second", "generated_tokens_per_second")
"""Fields of a generation in a file that are computed from others."""
TIMING = ("milliseconds", "range_ms", "samples", "drift", "source", "method")
"""Fields of a time in a file."""
STATUSES = ("passed", "failed", "timed out", "skipped")
CHOICES = {"clock": CLOCKS, "method": (*METHODS,), "status": STATUSES}
"""Fields that are one of some texts."""


def row(found: Any) -> dict[str, Any]:
    """Returns the object of a row or a stage; the fields of a `timing` are its own."""
    data = {
        field.name: _encoded(field.name, getattr(found, field.name))
        for field in fields(found)
    }
    if isinstance(found, GenerationRow):
        rates = found.prompt_rate, found.generation_rate
        data |= {name: round(rate, 3) for name, rate in zip(RATES, rates, strict=True)}
    data.update(data.pop("timing", {}))
    return data


def _encoded(name: str, value: Any) -> Any:
    if isinstance(value, Timing):
        return timing(value)
    if isinstance(value, Problem):
        return {each: getattr(value, each) for each in PROBLEM}
    if isinstance(value, Plan):
        plan = encoded(value)
        return {each: plan[each] for each in plan if each != "problem"}
    if name in ("model", "arm", "name"):
        return as_name(value)
    return redacted(value) if name in ("handover", "detail") and value else value


def timing(found: Timing) -> dict[str, Any]:
    """Returns the object of a time."""
    return {
        "milliseconds": float(f"{found.seconds * 1e3:.6g}"),
        "range_ms": float(f"{found.range * 1e3:.6g}"),
        "samples": found.samples,
        "drift": round(found.drift, 4),
        "source": found.source,
        "method": found.method,
    }


def decoded(type_: Any, data: Any, where: str) -> Any:
    """Returns the value of a dataclass, or of a field's type, that `data` encodes."""
    if is_dataclass(type_):
        return _dataclass(type_, data, where)
    if get_origin(type_) is list:
        _check_type(list, data, where)
        (of,) = get_args(type_)
        return [decoded(of, item, f"{where}[{i}]") for i, item in enumerate(data)]
    if NoneType in get_args(type_):
        (type_,) = {*get_args(type_)} - {NoneType}
        return None if data is None else decoded(type_, data, where)
    if type_ is float and type(data) is int:
        data = float(data)
    _check_type(type_, data, where)
    choices = CHOICES.get(where.rpartition(".")[2], (data,))
    if data not in choices:
        raise ValueError(f"{where} is {quoted(data, 60)}, expected one of {choices}")
    return data


def _dataclass(type_: Any, data: Any, where: str) -> Any:
    _check_type(dict, data, where)
    try:
        values = FORMS[type_](data) if type_ in FORMS else data
    except KeyError as error:
        raise ValueError(f"{where} has no {error}") from error
    except Exception as error:  # of a form that does not fit
        raise ValueError(f"{where}: {error}") from error
    types = {field.name: field.type for field in fields(type_)}
    if wrong := values.keys() ^ types.keys():
        raise ValueError(
            f"{where} has not the fields {', '.join(types)}: "
            f"{', '.join(sorted(wrong))} is missing or unknown"
        )
    return type_(
        **{
            name: values[name]
            if is_dataclass(values[name])
            else decoded(types[name], values[name], f"{where}.{name}")
            for name in types
        }
    )


def _check_type(type_: type, data: Any, where: str) -> None:
    if type(data) is not type_:
        raise ValueError(f"{where} is {quoted(data, 60)}, expected {type_.__name__}")


def _product_form(data: dict[str, Any]) -> dict[str, Any]:
    problem = _problem(data["problem"])
    plan = None if data["plan"] is None else _plan(problem, data["plan"])
    timing = {name: data[name] for name in TIMING}
    rest = {name: value for name, value in data.items() if name not in timing}
    return rest | {"problem": problem, "plan": plan, "timing": timing}


def _timing_form(data: dict[str, Any]) -> dict[str, Any]:
    values = {**data}
    seconds = values.pop("milliseconds") / 1e3
    if not 0 < seconds < inf:
        raise ValueError(f"milliseconds is {seconds * 1e3:g}, expected a time")
    method, source = values["method"], values.pop("source")
    if method in METHODS and source != METHODS[method]:
        raise ValueError(f"source={source!r} is not that of method={method!r}")
    return values | {"seconds": seconds, "range": values.pop("range_ms") / 1e3}


def _generation_form(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a row; its rates are computed anew."""
    return {name: value for name, value in data.items() if name not in RATES}


FORMS: dict[type, Callable[[dict[str, Any]], dict[str, Any]]] = {
    ProductRow: _product_form,
    GenerationRow: _generation_form,
    Timing: _timing_form,
}
"""What makes the fields of a dataclass of an object that has others."""


def _problem(data: Any) -> Problem:
    _check_type(dict, data, "problem")
    if data.keys() != {*PROBLEM}:
        raise ValueError(f"problem has not the fields {', '.join(PROBLEM)}")
    for name in PROBLEM:
        is_text = name in ("mode", "dtype", "layout")
        _check_type(str if is_text else int, data[name], f"problem.{name}")
    return problem_of(**data)


def _plan(problem: Problem, plan: Any) -> Plan:
    if "problem" in plan:
        raise ValueError("plan has a problem of its own")
    whole = {"problem": encoded(problem), **plan}
    found: Plan = measurement_json.decoded(registry.plan_type(plan["kernel"]), whole)
    if found.work.threadgroups > found.work.total:
        raise ValueError(
            f"threadgroups={found.work.threadgroups} is more than {found.work.total}, "
            f"the k tiles of all tiles"
        )
    return found
