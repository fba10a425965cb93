"""Reads and writes what was measured here, which replaces the cost model.

A machine has one JSON file. Its name contains a digest of everything that the times
depend on, so results are not found after a change of MLX, the system or a kernel. A
file or a result that is not valid is ignored with a warning. `MLX_MARLIN_TUNED=0`
ignores all files.
"""

import os
import warnings
from bisect import bisect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlx_marlin import cache, regular_files, state
from mlx_marlin.backends import devices, registry
from mlx_marlin.backends.source import digest_of_shaders
from mlx_marlin.planning import measurement
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.measurement import (
    DECODE_ERRORS,
    AnyProblem,
    Forwards,
    Machine,
    Measured,
    Result,
)
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work import Work
from mlx_marlin.planning.work.tiles import Tile

ENVIRONMENT = "MLX_MARLIN_TUNED"
"""If it is 0, no results are read."""
Results = dict[AnyProblem, Result]
UNFINISHED = "not measured yet, or too noisy: stock MLX serves it until it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What is known of a machine.

    Attributes:
        results: The results of problems.
        forwards: The times of whole models, by their keys.
        unfinished: Families of problems whose race is not finished, and the rows or
            pairs; None: all. No file holds them.
    """

    results: Results = field(default_factory=dict)
    forwards: dict[str, Forwards] = field(default_factory=dict)
    unfinished: set[tuple[AnyProblem, int | None]] = field(default_factory=set)


_of_process: dict[Machine, Stored] = {}
"""What this process has measured and could not write, and what it did not finish. It
outlives `state.reset`, since no file has it."""


def folder() -> Path:
    """Returns the folder of the results of all machines; it may not exist."""
    return cache.folder("tuned")


def machine(target: PlanningDevice, backend: str) -> Machine:
    """Returns what the times of kernels depend on in this process.

    Args:
        target: The device that plans are made for.
        backend: "metal", "cuda" or "emulator".
    """
    import platform

    import mlx.core as mx

    version = platform.mac_ver()[0] or platform.release()
    return measurement.machine(
        target,
        backend=backend,
        system=f"{platform.system()} {version}",
        mlx=str(mx.__version__),  # type: ignore[attr-defined]
        kernels=kernels(backend),
    )


def stands_for_another(backend: str) -> bool:
    """Returns whether plans are made for another chip than the one that runs them.

    This is so if MLX_MARLIN_DEVICE is set. Then no times of this chip are used.
    """
    return backend != "emulator" and bool(os.environ.get(devices.ENVIRONMENT))


def find(problem: AnyProblem, target: PlanningDevice, backend: str) -> Measured | None:
    """Returns what measurements say about a problem, or None if they say nothing.

    The first call reads the file. Products are measured without an epilogue, and the
    result holds for any. Gated, rotated and normalized products have plans of their
    own, which the cost model chooses. Between two measured numbers of rows, our kernels
    serve only if they do at both.

    Args:
        problem: The problem to compute.
        target: As for `machine`.
        backend: "metal", "cuda" or "emulator".
    """
    known = _found(target, backend)
    if not known.results and not known.unfinished:
        return None
    measured = measurement.plain(problem)
    result = known.results.get(measured)
    if result is not None:
        return Measured.of(result, problem)
    one, m = measurement.family(measured)
    if (one, m) in known.unfinished or ((one, None) in known.unfinished and m > 1):
        return Measured(reason=UNFINISHED)
    by_rows = _by_rows(target, backend).get(one, {})
    rows = sorted(by_rows)
    index = bisect(rows, m)
    if 0 < index < len(rows):
        return Measured.between(by_rows[rows[index - 1]], by_rows[rows[index]])
    return None


def known(results_folder: Path, here: Machine) -> Stored:
    """Returns what a machine's file holds and what only this process knows.

    Args:
        results_folder: The folder of all results.
        here: The machine.
    """
    stored, own = read(results_folder, here), _own(here)
    return Stored(
        results=stored.results | own.results,
        forwards=stored.forwards | own.forwards,
        unfinished=own.unfinished,
    )


def remember(
    here: Machine, results: Iterable[Result], forwards: Iterable[Forwards]
) -> None:
    """Keeps results for this process only, because they could not be written.

    Args:
        here: The machine.
        results: The results.
        forwards: Times of whole models.
    """
    own = _own(here)
    own.results.update((each.problem, each) for each in results)
    own.forwards.update((each.key, each) for each in forwards)


def leave_to_stock(here: Machine, problem: AnyProblem, rows: int | None = None) -> None:
    """Lets stock MLX serve a problem in this process, because its race is unfinished.

    Args:
        here: The machine.
        problem: The problem.
        rows: Its rows, or pairs of experts; None for any number that is not measured.
    """
    _own(here).unfinished.add((_family(problem), rows))


def begin_again(here: Machine, problem: AnyProblem) -> None:
    """Takes back what `leave_to_stock` did for a problem with any number of rows.

    Args:
        here: The machine.
        problem: The problem.
    """
    unfinished, family = _own(here).unfinished, _family(problem)
    unfinished -= {each for each in unfinished if each[0] == family}


def _family(problem: AnyProblem) -> AnyProblem:
    return measurement.family(measurement.plain(problem))[0]


def _own(here: Machine) -> Stored:
    return _of_process.setdefault(here, Stored())


def forwards(target: PlanningDevice, backend: str) -> dict[str, Forwards]:
    """Returns the times of whole models on this machine, by their keys."""
    return _found(target, backend).forwards


def read(results_folder: Path, here: Machine) -> Stored:
    """Reads what was measured on a machine; warns once if some is not valid.

    Args:
        results_folder: The folder of all results.
        here: The machine.
    """
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
    """Returns what has changed since this chip was measured last, or "" if it was not.

    Args:
        results_folder: The folder of all results.
        here: The machine.
    """
    prefix = here.file_name.rsplit("-", 1)[0]
    files = [*results_folder.glob(f"{prefix}-*.json")]
    for file in sorted(files, key=_written_at, reverse=True):
        try:
            before = _machine_of(file)
        except (OSError, RecursionError, *DECODE_ERRORS):
            continue
        return measurement.differences(before, here)
    return ""


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
    """Adds results to a machine's file; they replace older ones for the same problems.

    Several processes may write at the same time; no results are lost.

    Args:
        results_folder: The folder of all results; created if it is missing.
        here: The machine.
        results: The results to add.
        forwards: Times of whole models to add.

    Returns:
        The file.

    Raises:
        OSError: If the folder cannot be written to, or is not trusted.
    """
    with locked(results_folder):
        before = read(results_folder, here)
        merged = Stored(
            results=before.results | {each.problem: each for each in results},
            forwards=before.forwards | {each.key: each for each in forwards},
        )
        # The write is atomic, because readers take no lock.
        return cache.write(results_folder, here.file_name, _text(here, merged).encode())


def clear(results_folder: Path) -> int:
    """Removes the results of all machines and returns the number of files.

    Raises:
        OSError: If the folder is not trusted.
        ValueError: If it is a link.
    """
    if not os.path.lexists(results_folder):
        return 0
    from mlx_marlin import removal

    with removal.opened(results_folder) as opened, locked(results_folder):
        return removal.remove_matching("*.json", opened)


@lru_cache(maxsize=1)
def kernels(backend: str) -> str:
    """Returns a digest of all kernels' texts and of the fields of a result.

    MLX is not imported.

    Args:
        backend: As for `machine`.
    """
    import hashlib

    digest = hashlib.sha256(digest_of_shaders().encode())
    plans = sorted(registry.named(backend).traits.launches, key=lambda t: t.__name__)
    for type_ in (Problem, Epilogue, *plans, Tile, Work, Result, Forwards):
        names = [field.name for field in fields(type_)]
        digest.update(f"{type_.__name__} {names}".encode())
    return digest.hexdigest()[:16]


@contextmanager
def locked(results_folder: Path) -> Iterator[None]:
    """Locks a folder against other writers; creates it if it is missing.

    Raises:
        OSError: If the folder cannot be written to, or is not trusted.
    """
    import fcntl

    cache.make(results_folder)
    with cache.open_to_write(results_folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@state.cache(maxsize=8)
def _found(target: PlanningDevice, backend: str) -> Stored:
    if os.environ.get(ENVIRONMENT) == "0" or stands_for_another(backend):
        return Stored()
    results_folder, here = folder(), machine(target, backend)
    if not os.path.isdir(results_folder):  # False without access, unlike Path.is_dir
        return _own(here)
    return known(results_folder, here)


@state.cache(maxsize=8)
def _by_rows(
    target: PlanningDevice, backend: str
) -> dict[AnyProblem, dict[int, Result]]:
    """Returns the results by what their problems have in common, and by their rows."""
    found: dict[AnyProblem, dict[int, Result]] = {}
    for problem, result in _found(target, backend).results.items():
        one, m = measurement.family(problem)
        found.setdefault(one, {})[m] = result
    return found


def _data(file: Path) -> dict[str, Any]:
    import json

    if reason := cache.why_untrusted(file):
        raise PermissionError(reason)
    data = json.loads(regular_files.read(file))
    if not isinstance(data, dict):
        raise ValueError("expected an object")
    return data


def _machine_of(file: Path) -> Machine:
    return measurement.machine_of(_data(file)["machine"])


def _read(file: Path, here: Machine, complaints: list[str]) -> Stored:
    try:
        data = _data(file)
        rows, models = [*data["results"]], [*data["forwards"]]
        if measurement.machine_of(data["machine"]) != here:
            raise ValueError("they belong to another machine")
    except FileNotFoundError:
        return Stored()
    except (OSError, RecursionError, *DECODE_ERRORS) as error:
        complaints.append(f"{type(error).__name__}: {error}")
        return Stored()
    stored = Stored()
    for row in rows:
        try:
            result = measurement.result(row, _plan_type)
        except DECODE_ERRORS as error:
            complaints.append(f"{type(error).__name__}: {error}")
        else:
            stored.results[result.problem] = result
    for row in models:
        try:
            model = measurement.forwards_of(row)
        except DECODE_ERRORS as error:
            complaints.append(f"{type(error).__name__}: {error}")
        else:
            stored.forwards[model.key] = model
    return stored


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
        "machine": measurement.machine_row(here),
        "results": [measurement.row(result) for result in ordered],
        "forwards": [
            measurement.forwards_row(stored.forwards[key])
            for key in sorted(stored.forwards)
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def _order(problem: AnyProblem) -> tuple[int, int, int, str]:
    product = measurement.product_of(problem)
    return product.n, product.k, product.m, repr(problem)
