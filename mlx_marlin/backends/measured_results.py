"""What was measured here, which replaces the cost model.

Results are those of the machine's file and those that only this process knows.
`MLX_MARLIN_TUNED=0` ignores all files.
"""

import os
from bisect import bisect
from collections.abc import Iterable
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlx_marlin import state
from mlx_marlin.backends import devices, registry, result_files
from mlx_marlin.backends.source import digest_of_shaders
from mlx_marlin.planning import measurement
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.gather_plan import AnyProblem
from mlx_marlin.planning.measurement import (
    PROMPTS,
    Forwards,
    Machine,
    Measured,
    Result,
)
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.tiles import Tile
from mlx_marlin.planning.work.work import Work

ENVIRONMENT = "MLX_MARLIN_TUNED"
"""If it is 0, no results are read."""
UNFINISHED = "not measured: stock MLX serves it"


_of_process: dict[Machine, result_files.Stored] = {}
"""What this process has measured and could not write, and what it did not finish. It
outlives `state.reset`, since no file has it."""


def machine(target: PlanningDevice, backend: str) -> Machine:
    """Returns what the times of kernels depend on in this process."""
    import mlx.core as mx

    emulated = backend == "emulator"
    return Machine(
        chip=f"emulator for {target.name}" if emulated else target.name,
        architecture=target.arch,
        cores=target.cores,
        system=system(),
        mlx=str(mx.__version__),  # type: ignore[attr-defined]
        kernels=kernels(backend),
    )


def system() -> str:
    """Returns the operating system and its version."""
    import platform

    version = platform.mac_ver()[0] or platform.release()
    return f"{platform.system()} {version}"


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
    """
    known = _found(target, backend)
    if not known.results and not known.unfinished:
        return None
    measured = measurement.plain(problem)
    result = known.results.get(measured)
    if result is not None:
        return Measured.of(result, problem)
    one, m = measurement.family(measured)
    if one in known.unfinished and m > 1:
        return Measured(reason=UNFINISHED)
    by_rows = _by_rows(target, backend).get(one, {})
    rows = sorted(by_rows)
    index = bisect(rows, m)
    if 0 < index < len(rows):
        return Measured.between(by_rows[rows[index - 1]], by_rows[rows[index]])
    if rows and m > rows[-1] >= PROMPTS[0]:
        return Measured.beyond(by_rows[rows[-1]])
    return None


def known(results_folder: Path, here: Machine) -> result_files.Stored:
    """Returns what a machine's file holds and what only this process knows."""
    return result_files.read(results_folder, here) | _own(here)


def keep(
    results_folder: Path,
    here: Machine,
    results: Iterable[Result] = (),
    forwards: Iterable[Forwards] = (),
    settings: Iterable[Any] = (),
) -> None:
    """Writes results, with those of this process that could not be written before.

    If that fails, this process remembers them.
    """
    own = _own(here)
    own.results.update((each.problem, each) for each in results)
    own.forwards.update((each.key, each) for each in forwards)
    own.settings.update((each["key"], each) for each in settings)
    result_files.add(results_folder, here, own)
    for each in (own.results, own.forwards, own.settings):
        each.clear()  # they would hide newer ones of the file


def leave_to_stock(here: Machine, problem: AnyProblem) -> None:
    """Lets stock MLX serve several rows in this process from `state.reset` on."""
    _own(here).unfinished.add(_family(problem))


def begin_again(here: Machine, problem: AnyProblem) -> None:
    """Takes back what `leave_to_stock` did for a problem with any number of rows."""
    _own(here).unfinished.discard(_family(problem))


def _family(problem: AnyProblem) -> AnyProblem:
    return measurement.family(measurement.plain(problem))[0]


def _own(here: Machine) -> result_files.Stored:
    return _of_process.setdefault(here, result_files.Stored())


def forwards(target: PlanningDevice, backend: str) -> dict[str, Forwards]:
    """Returns the times of whole models on this machine, by their keys."""
    return _found(target, backend).forwards


def settings(target: PlanningDevice, backend: str) -> dict[str, Any]:
    """Returns the settings of whole models on this machine, by the models' keys."""
    return _found(target, backend).settings


@lru_cache(maxsize=1)
def kernels(backend: str) -> str:
    """Returns a digest of all kernels' texts and of the fields of a result.

    MLX is not imported.
    """
    import hashlib

    digest = hashlib.sha256(digest_of_shaders().encode())
    plans = sorted(registry.named(backend).traits.launches, key=lambda t: t.__name__)
    for type_ in (Problem, Epilogue, *plans, Tile, Work, Result, Forwards):
        names = [field.name for field in fields(type_)]
        digest.update(f"{type_.__name__} {names}".encode())
    return digest.hexdigest()[:16]


@state.cache(maxsize=8)
def _found(target: PlanningDevice, backend: str) -> result_files.Stored:
    if os.environ.get(ENVIRONMENT) == "0" or stands_for_another(backend):
        return result_files.Stored()
    results_folder = result_files.folder()
    # False without access, unlike Path.is_dir
    is_there = os.path.isdir(results_folder)
    if not is_there and not _of_process:
        return result_files.Stored()
    here = machine(target, backend)
    return known(results_folder, here) if is_there else _own(here)


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
