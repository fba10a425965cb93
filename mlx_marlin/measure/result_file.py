"""Result files of benchmarks: JSON with a version, without personal data.

docs/measuring.md describes the fields. `read` decodes a file of limited size into
dataclasses, and raises ValueError for what is missing, unknown or of another type.
"""

import json
import re
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date
from pathlib import Path
from typing import Any

from mlx_marlin import regular_files
from mlx_marlin.backends import registry
from mlx_marlin.evidence import codec
from mlx_marlin.evidence.codec import Forms, encoded
from mlx_marlin.measure.privacy import as_name, redacted
from mlx_marlin.measure.rows import (
    FirstTokenRow,
    GenerationRow,
    MachineFacts,
    ProductRow,
    Stage,
)
from mlx_marlin.planning.device import PARAVIRTUAL
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of

SCHEMA = "mlx-marlin result"
VERSION = 2
"""Version 1 had milliseconds, beside the other fields of a row."""
MOST_BYTES = 32 * 2**20
"""Largest file that is read; one of `make mac` has less than a megabyte."""
PROBLEM = ("m", "n", "k", "mode", "bits", "group_size", "dtype", "layout")
"""Fields of a problem in a file."""
FREE_TEXTS = ("handover", "detail", "notes")
"""Fields whose texts are sentences; those of other fields are names."""


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
    source = "measured" if result.is_measured else "predicted"
    data = {"schema": SCHEMA, "version": VERSION, "source": source, **_encoded(result)}
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _encoded(value: Any, name: str = "") -> Any:
    """Returns the value of a field as JSON has it, without anything personal."""
    if isinstance(value, str):
        return (redacted if name in FREE_TEXTS else as_name)(value)
    if isinstance(value, list | tuple):
        return [_encoded(each, name) for each in value]
    if not is_dataclass(value):
        return value
    names = [each.name for each in fields(value) if each.init]
    if isinstance(value, Problem):
        names = [*PROBLEM]
    elif isinstance(value, Plan):
        names.remove("problem")  # that of its row
    return {each: _encoded(getattr(value, each), each) for each in names}


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


def _product_form(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a row; its plan has the row's problem."""
    if data["problem"].keys() != {*PROBLEM}:
        raise ValueError(f"problem has not the fields {', '.join(PROBLEM)}")
    problem = problem_of(**data["problem"])
    plan = data["plan"]
    return data | {"problem": problem, "plan": plan and _plan(problem, plan)}


FORMS: Forms = {ProductRow: _product_form}


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
