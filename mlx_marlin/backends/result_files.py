"""The files of measured results: one JSON file for each machine.

The name of a file contains a digest of everything that the times depend on, so results
are not found after a change of MLX, the system or a kernel. A file or a result that is
not valid is ignored with a warning.
"""

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mlx_marlin import cache, regular_files
from mlx_marlin.backends import registry
from mlx_marlin.evidence import codec
from mlx_marlin.planning import measurement
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.gather_plan import AnyProblem
from mlx_marlin.planning.measurement import Forwards, Machine, Result

Results = dict[AnyProblem, Result]
SERVED_BY = ("ours", "stock")


@dataclass(frozen=True, slots=True)
class Stored:
    """What is known of a machine."""

    results: Results = field(default_factory=dict)  # The results of problems
    # The times of whole models, by their keys
    forwards: dict[str, Forwards] = field(default_factory=dict)
    # The settings of whole models as JSON has them, by the models' keys
    settings: dict[str, Any] = field(default_factory=dict)
    # Families of problems whose race is not finished. No file holds them
    unfinished: set[AnyProblem] = field(default_factory=set)

    def __or__(self, newer: "Stored") -> "Stored":
        names = [each.name for each in fields(self)]
        return Stored(*(getattr(self, name) | getattr(newer, name) for name in names))


def folder() -> Path:
    """Returns the folder of the results of all machines; it may not exist."""
    return cache.folder("tuned")


def read(results_folder: Path, here: Machine) -> Stored:
    """Reads what was measured on a machine; warns once if some is not valid."""
    complaints: list[str] = []
    stored = _read(results_folder / here.file_name, here, complaints)
    if complaints:
        more = f" (and {len(complaints) - 1} more)" if complaints[1:] else ""
        warnings.warn(
            f"mlx_marlin: measured results in {results_folder / here.file_name} are "
            f"ignored: {complaints[0]}{more}; they are measured again",
            RuntimeWarning,
            stacklevel=2,
        )
    return stored


def changes(results_folder: Path, here: Machine) -> str:
    """Returns what has changed since this chip was measured last, or "" if it was
    not."""
    before = next(machines(results_folder, here), None)
    return "" if before is None else measurement.differences(before, here)


def machines(results_folder: Path, here: Machine) -> Iterator[Machine]:
    """Yields the machines of a chip's files, that of the newest file first."""
    prefix = here.file_name.rsplit("-", 1)[0]
    files = [*results_folder.glob(f"{prefix}-*.json")]
    for file in sorted(files, key=_written_at, reverse=True):
        with suppress(OSError, ValueError):
            yield _machine_of(file)


def _written_at(file: Path) -> float:
    """Returns when a file was written, or 0 if it is gone."""
    try:
        return os.path.getmtime(file)
    except OSError:
        return 0.0


def write(
    results_folder: Path,
    here: Machine,
    results: Iterable[Result] = (),
    forwards: Iterable[Forwards] = (),
) -> Path:
    """Adds results to a machine's file, as `add` does."""
    new = Stored({r.problem: r for r in results}, {f.key: f for f in forwards})
    return add(results_folder, here, new)


def add(results_folder: Path, here: Machine, new: Stored) -> Path:
    """Adds to a machine's file what replaces older results of the same problems.

    Several processes may write at the same time: each waits for the others. One that
    waits in vain raises a `cache.LockedError` and has written nothing.
    """
    with locked(results_folder):
        content = _text(here, read(results_folder, here) | new).encode()
        # The write is atomic, because readers take no lock.
        return cache.write(results_folder, here.file_name, content)


def clear(results_folder: Path) -> int:
    """Removes the results of all machines and returns the number of files."""
    if not os.path.lexists(results_folder):
        return 0
    with cache.own(results_folder) as opened, locked(results_folder):
        return cache.clear(opened, "*.json")


@contextmanager
def locked(results_folder: Path) -> Iterator[None]:
    """Locks a folder against other writers; creates it if it is missing."""
    cache.make(results_folder)
    with cache.locked(results_folder / "lock"):
        yield


def _machine_of(file: Path) -> Machine:
    data = cache.read_json(file)
    with regular_files.decoding():
        found: Machine = codec.decoded(Machine, data["machine"], "machine")
        return found


def _read(file: Path, here: Machine, complaints: list[str]) -> Stored:
    stored = Stored()
    try:
        data = cache.read_json(file)
        with regular_files.decoding():
            machine = codec.decoded(Machine, data["machine"], "machine")
            rows, models = (_list(data, name) for name in ("results", "forwards"))
            settings = _list({"settings": []} | data, "settings")
        if machine != here:
            raise ValueError("they belong to another machine")
    except FileNotFoundError:
        return stored
    except (OSError, ValueError) as error:
        complaints.append(str(error))
        return stored
    for row in rows:
        with _complaining(complaints):
            result = decoded(row)
            stored.results[result.problem] = result
    for row in models:
        with _complaining(complaints):
            model = codec.decoded(Forwards, row, "forwards")
            stored.forwards[model.key] = model
    for row in settings:
        with _complaining(complaints):
            stored.settings[codec.decoded(str, row["key"], "key")] = row
    return stored


def _list(data: Any, name: str) -> list[Any]:
    if not isinstance(found := data[name], list):
        raise ValueError(f"{name}={regular_files.quoted(found)}, expected a list")
    return found


@contextmanager
def _complaining(complaints: list[str]) -> Iterator[None]:
    try:
        with regular_files.decoding():
            yield
    except ValueError as error:
        complaints.append(str(error))


def row(result: Result) -> dict[str, Any]:
    """Returns a result as JSON-serializable values."""
    data = codec.encoded(result)
    stock = data.pop("stock")
    plan = result.plan
    kind = {"type": type(plan).__name__, "backend": plan.backend}
    return {**kind, "served_by": SERVED_BY[stock], **data}


def _form(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the result that a row encodes."""
    data = {**row}
    type_ = _plan_type(str(data.pop("backend")), str(data.pop("type")))
    served_by = data.pop("served_by")
    if served_by not in SERVED_BY:
        shown = regular_files.quoted(served_by, 60)
        raise ValueError(f"served_by={shown}, expected {SERVED_BY}")
    plan = codec.decoded(type_, data["plan"], "plan")
    return {**data, "plan": plan, "stock": served_by == "stock"}


def decoded(row: Any) -> Result:
    """Returns the result that a row encodes."""
    found: Result = codec.decoded(Result, row, "result", {Result: _form})
    return found


def _plan_type(backend: str, name: str) -> type:
    """Returns the type of a plan in a file."""
    if name == DequantizePlan.__name__:  # of any back end
        return DequantizePlan
    if backend not in registry.MODULES:
        raise ValueError(f"backend={backend!r} is not one of {(*registry.MODULES,)}")
    types = {each.__name__: each for each in registry.named(backend).traits.launches}
    if name not in types:
        raise ValueError(f"type={name!r} is not one of {', '.join(types)}")
    return types[name]


def _text(here: Machine, stored: Stored) -> str:
    import json

    ordered = sorted(stored.results.values(), key=lambda each: _order(each.problem))
    data = {
        "machine": codec.encoded(here),
        "results": [row(result) for result in ordered],
        "forwards": [
            codec.encoded(stored.forwards[key]) for key in sorted(stored.forwards)
        ],
        "settings": [stored.settings[key] for key in sorted(stored.settings)],
    }
    return json.dumps(data, indent=1) + "\n"


def _order(problem: AnyProblem) -> tuple[int, int, int, str]:
    product = measurement.product_of(problem)
    return product.n, product.k, product.m, repr(problem)
