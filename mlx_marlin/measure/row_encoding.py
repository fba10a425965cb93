"""Rows of a benchmark as JSON objects, and back."""

from typing import Any

from mlx_marlin.backends import registry
from mlx_marlin.measure.fields import Fields, as_name
from mlx_marlin.measure.privacy import redacted
from mlx_marlin.measure.rows import (
    CLOCKS,
    METHODS,
    OURS,
    STOCK_MODEL,
    FirstTokenRow,
    GenerationRow,
    ProductRow,
    Timing,
)
from mlx_marlin.planning.measurement import decoded, encoded
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.weights.formats import LAYOUTS, MODES

PROBLEM = ("m", "n", "k", "mode", "bits", "group_size", "dtype", "layout")
"""Fields of a problem in a file."""
LONGEST = 1e6
"""Most milliseconds of anything that is measured."""
MOST = 2**31
MODEL_ARMS = (OURS, STOCK_MODEL)


def product(row: ProductRow) -> dict[str, Any]:
    """Returns the object of a product's time."""
    plan = None if row.plan is None else encoded(row.plan)
    if plan is not None:
        del plan["problem"]
    return {
        "problem": {name: getattr(row.problem, name) for name in PROBLEM},
        "arm": as_name(row.arm),
        "clock": row.clock,
        **_timing(row.timing),
        "handover": None if row.handover is None else redacted(row.handover),
        "plan": plan,
    }


def product_of(data: Fields) -> ProductRow:
    """Returns the row that an object encodes.

    Raises:
        DECODE_ERRORS: If it does not encode one.
    """
    problem = _problem(Fields(data.raw("problem"), "problem"))
    handover, plan = data.raw("handover"), data.raw("plan")
    return ProductRow(
        problem=problem,
        arm=data.name("arm"),
        clock=data.choice("clock", CLOCKS),
        timing=_timing_of(data),
        plan=None if plan is None else _plan(problem, plan),
        handover=None if handover is None else data.text("handover"),
    )


def generation(row: GenerationRow) -> dict[str, Any]:
    """Returns the object of a model's speed."""
    return {
        "model": as_name(row.model),
        "arm": row.arm,
        "streams": row.streams,
        "prompt_tokens": row.prompt_tokens,
        "new_tokens": row.new_tokens,
        "prompt": _timing(row.prompt),
        "step": _timing(row.step),
        "prompt_tokens_per_second": round(row.prompt_rate, 3),
        "generated_tokens_per_second": round(row.generation_rate, 3),
    }


def generation_of(data: Fields) -> GenerationRow:
    """Returns the row that an object encodes; its rates are computed anew.

    Raises:
        DECODE_ERRORS: If it does not encode one.
    """
    for rate in ("prompt_tokens_per_second", "generated_tokens_per_second"):
        data.number(rate, 0, 1e12)
    return GenerationRow(
        model=data.name("model"),
        arm=data.choice("arm", MODEL_ARMS),
        streams=data.integer("streams", 1, MOST),
        prompt_tokens=data.integer("prompt_tokens", 1, MOST),
        new_tokens=data.integer("new_tokens", 1, MOST),
        prompt=_nested(data, "prompt"),
        step=_nested(data, "step"),
    )


def first_token(row: FirstTokenRow) -> dict[str, Any]:
    """Returns the object of a time to the first token."""
    return {
        "model": as_name(row.model),
        "arm": row.arm,
        "prompt_tokens": row.prompt_tokens,
        "cold": _timing(row.cold),
        "warm": _timing(row.warm),
    }


def first_token_of(data: Fields) -> FirstTokenRow:
    """Returns the row that an object encodes.

    Raises:
        DECODE_ERRORS: If it does not encode one.
    """
    return FirstTokenRow(
        model=data.name("model"),
        arm=data.choice("arm", MODEL_ARMS),
        prompt_tokens=data.integer("prompt_tokens", 1, MOST),
        cold=_nested(data, "cold"),
        warm=_nested(data, "warm"),
    )


def _timing(timing: Timing) -> dict[str, Any]:
    return {
        "milliseconds": float(f"{timing.seconds * 1e3:.6g}"),
        "range_ms": float(f"{timing.range * 1e3:.6g}"),
        "samples": timing.samples,
        "drift": round(timing.drift, 4),
        "source": timing.source,
        "method": timing.method,
    }


def _timing_of(data: Fields) -> Timing:
    method = data.choice("method", [*METHODS])
    data.choice("source", [METHODS[method]])
    seconds = data.number("milliseconds", 0, LONGEST) / 1e3
    if not seconds:
        raise ValueError("milliseconds is 0, expected a time")
    return Timing(
        seconds=seconds,
        method=method,
        range=data.number("range_ms", 0, LONGEST) / 1e3,
        samples=data.integer("samples", 1, MOST),
        drift=data.number("drift", -1, 1e3),
    )


def _nested(data: Fields, key: str) -> Timing:
    found = Fields(data.raw(key), key)
    timing = _timing_of(found)
    found.done()
    return timing


def _problem(data: Fields) -> Problem:
    problem = problem_of(
        *(data.integer(name, 1, MOST) for name in PROBLEM[:3]),
        mode=data.choice("mode", MODES),
        bits=data.integer("bits", 1, 16),
        group_size=data.integer("group_size", 1, MOST),
        dtype=data.name("dtype"),
        layout=data.choice("layout", LAYOUTS),
    )
    data.done()
    return problem


def _plan(problem: Problem, plan: Any) -> Plan:
    if not isinstance(plan, dict) or not isinstance(plan.get("kernel"), str):
        raise ValueError("plan is not the object of a plan")
    if "problem" in plan:
        raise ValueError("plan has a problem of its own")
    whole = {"problem": encoded(problem), **plan}
    found: Plan = decoded(registry.plan_type(plan["kernel"]), whole)
    if found.work.threadgroups > found.work.total:
        raise ValueError(
            f"threadgroups={found.work.threadgroups} is more than {found.work.total}, "
            f"the k tiles of all tiles"
        )
    return found
