"""Result files of benchmarks: JSON with a version, without personal data.

docs/measuring.md describes the fields. `read` decodes a file of limited size into
dataclasses, and raises ValueError for what is missing, unknown or of another type.
"""

import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from math import inf
from pathlib import Path
from typing import Any

from mlx_marlin import regular_files
from mlx_marlin.backends import registry
from mlx_marlin.evidence import codec
from mlx_marlin.evidence.codec import Forms, check_type, encoded
from mlx_marlin.measure.privacy import as_name, redacted
from mlx_marlin.measure.rows import (
    CLOCKS,
    METHODS,
    STATUSES,
    FirstTokenRow,
    GenerationRow,
    MachineFacts,
    ProductRow,
    Stage,
    Timing,
)
from mlx_marlin.planning.device import PARAVIRTUAL
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of

SCHEMA = "mlx-marlin result"
VERSION = 1
MOST_BYTES = 32 * 2**20
"""Largest file that is read; one of `make mac` has less than a megabyte."""
PROBLEM = ("m", "n", "k", "mode", "bits", "group_size", "dtype", "layout")
"""Fields of a problem in a file."""
RATES = ("prompt_tokens_per_second", "generated_tokens_per_second")
"""Fields of a generation in a file that are computed from others."""
TIMING = ("milliseconds", "range_ms", "samples", "drift", "source", "method")
"""Fields of a time in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFile:
    """The content of a result file."""

    machine: MachineFacts  # The machine
    date: str  # Day of the measurement, ISO 8601
    products: list[ProductRow] = field(default_factory=list)  # Times of products
    generation: list[GenerationRow] = field(default_factory=list)  # Speeds of models
    # Times to the first token
    first_tokens: list[FirstTokenRow] = field(default_factory=list)
    # Stages of `make mac`; none if only `bench` was run
    stages: list[Stage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # What was left out or is doubtful

    @property
    def is_measured(self) -> bool:
        """Whether every time is a measurement; one without any time is not."""
        timings = [row.timing for row in self.products]
        timings += [row.step for row in self.generation]
        timings += [row.warm for row in self.first_tokens]
        return bool(timings) and {t.source for t in timings} == {"measured"}

    @property
    def is_paravirtual(self) -> bool:
        """Whether a virtual machine's GPU ran it: no time of it says anything."""
        return self.machine.chip == PARAVIRTUAL

    @property
    def file_name(self) -> str:
        """The usual name: `mlx-marlin-CHIP-DATE.json`."""
        chip = re.sub(r"[^a-z0-9]+", "-", self.machine.chip.lower()).strip("-")
        return f"mlx-marlin-{chip}-{self.date}.json"


def text(result: ResultFile) -> str:
    """Returns the JSON of a result; free texts are redacted."""
    data = {
        "schema": SCHEMA,
        "version": VERSION,
        "date": result.date,
        "source": "measured" if result.is_measured else "predicted",
        "machine": {
            name: as_name(value) if isinstance(value, str) else value
            for name, value in asdict(result.machine).items()
        },
        "stages": [*map(_row, result.stages)],
        "products": [*map(_row, result.products)],
        "generation": [*map(_row, result.generation)],
        "first_tokens": [*map(_row, result.first_tokens)],
        "notes": [*map(redacted, result.notes)],
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def write(path: Path, result: ResultFile) -> None:
    """Writes a result file, whole or not at all."""
    part = path.with_name(path.name + ".part")
    regular_files.write(part, text(result))
    part.replace(path)


def read(path: Path) -> ResultFile:
    """Reads a result file."""
    content = regular_files.read(path, MOST_BYTES)
    try:
        with regular_files.decoding():
            return decoded(json.loads(content.decode("utf-8"), parse_constant=refuse))
    except ValueError as error:
        reason = redacted(str(error))
        raise ValueError(f"{path.name} is not a result file: {reason}") from error


def refuse(constant: str) -> None:
    """Refuses NaN and infinity, which Python's reader would take."""
    raise ValueError(f"{constant} is not a number of JSON")


def decoded(data: Any) -> ResultFile:
    """Returns the result that a JSON value describes, or raises a ValueError."""
    if not isinstance(data, dict):
        raise ValueError("it is not an object")
    found = {name: data.pop(name, None) for name in ("schema", "version", "source")}
    if found["schema"] != SCHEMA:
        raise ValueError(f"its schema is {found['schema']!r}, expected {SCHEMA!r}")
    if found["version"] != VERSION:
        raise ValueError(
            f"its version is {found['version']!r}, and this one reads {VERSION}"
        )
    result: ResultFile = codec.decoded(ResultFile, data, "the file", FORMS)
    if date.fromisoformat(result.date).isoformat() != result.date:
        raise ValueError(f"date={result.date!r}, expected one such as 2026-11-24")
    if found["source"] != ("measured" if result.is_measured else "predicted"):
        raise ValueError(f"source={found['source']!r} is not that of its rows")
    return result


def _row(found: Any) -> dict[str, Any]:
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


def _check_choice(data: dict[str, Any], name: str, choices: Collection[str]) -> None:
    if data[name] not in choices:
        raise ValueError(
            f"{name} is {regular_files.quoted(data[name], 60)}, expected {(*choices,)}"
        )


def _stage_form(data: dict[str, Any]) -> dict[str, Any]:
    _check_choice(data, "status", STATUSES)
    return data


def _product_form(data: dict[str, Any]) -> dict[str, Any]:
    _check_choice(data, "clock", CLOCKS)
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
    _check_choice(data, "method", [*METHODS])
    method, source = values["method"], values.pop("source")
    if source != METHODS[method]:
        raise ValueError(f"source={source!r} is not that of method={method!r}")
    return values | {"seconds": seconds, "range": values.pop("range_ms") / 1e3}


def _generation_form(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a row; its rates are computed anew."""
    return {name: value for name, value in data.items() if name not in RATES}


FORMS: Forms = {
    Stage: _stage_form,
    ProductRow: _product_form,
    GenerationRow: _generation_form,
    Timing: _timing_form,
}


def _problem(data: Any) -> Problem:
    check_type(dict, data, "problem")
    if data.keys() != {*PROBLEM}:
        raise ValueError(f"problem has not the fields {', '.join(PROBLEM)}")
    for name in PROBLEM:
        is_text = name in ("mode", "dtype", "layout")
        check_type(str if is_text else int, data[name], f"problem.{name}")
    return problem_of(**data)


def _plan(problem: Problem, plan: Any) -> Plan:
    if "problem" in plan:
        raise ValueError("plan has a problem of its own")
    whole = {"problem": encoded(problem), **plan}
    found: Plan = codec.decoded(registry.plan_type(plan["kernel"]), whole)
    if found.work.threadgroups > found.work.total:
        raise ValueError(
            f"threadgroups={found.work.threadgroups} is more than {found.work.total}, "
            f"the k tiles of all tiles"
        )
    return found
