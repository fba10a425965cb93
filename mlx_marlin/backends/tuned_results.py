"""Reads and writes the results of `mlx-marlin tune`, which replace the cost model.

A machine has one JSON file. Its name contains a digest of everything that the times
depend on, so results are not found after a change of MLX, the system or a kernel. A
file or a result that is not valid is ignored with a warning. `MLX_MARLIN_TUNED=0`
ignores all files.
"""

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

from mlx_marlin import cache, regular_files, state
from mlx_marlin.backends import devices, registry
from mlx_marlin.backends.source import digest_of_shaders
from mlx_marlin.planning import measurement
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.measurement import DECODE_ERRORS, Machine, Result
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work import Tile, Work

ENVIRONMENT = "MLX_MARLIN_TUNED"
"""If it is 0, no results are read."""
Results = dict[Problem, Result]


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


def find(problem: Problem, target: PlanningDevice, backend: str) -> Result | None:
    """Returns the measured result for a problem, or None.

    The first call reads the file. Products are measured without an epilogue, and the
    result holds for any; but it does not for gated and rotated products, which have
    plans of their own. Products of normalized rows are not measured.

    Args:
        problem: The product to compute.
        target: As for `machine`.
        backend: "metal", "cuda" or "emulator".
    """
    if problem.epilogue.is_paired:
        return None
    found = _found(target, backend).get(replace(problem, epilogue=PLAIN))
    return found and replace(found, plan=replace(found.plan, problem=problem))


def read(results_folder: Path, here: Machine) -> Results:
    """Reads the results of a machine; warns once if some are not valid.

    Args:
        results_folder: The folder of all results.
        here: The machine.
    """
    complaints: list[str] = []
    results = _read(results_folder / here.file_name, here, complaints)
    if complaints:
        more = f" (and {len(complaints) - 1} more)" if complaints[1:] else ""
        warnings.warn(
            f"mlx_marlin: tuned results in {results_folder / here.file_name} are "
            f"ignored: {complaints[0]}{more}; `mlx-marlin tune` measures them again",
            RuntimeWarning,
            stacklevel=2,
        )
    return results


def write(results_folder: Path, here: Machine, results: Iterable[Result]) -> Path:
    """Adds results to a machine's file; they replace older ones for the same problems.

    Several processes may write at the same time; no results are lost.

    Args:
        results_folder: The folder of all results; created if it is missing.
        here: The machine.
        results: The results to add.

    Returns:
        The file.

    Raises:
        OSError: If the folder cannot be written to, or is not trusted.
    """
    with locked(results_folder):
        added = {result.plan.problem: result for result in results}
        merged = read(results_folder, here) | added
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
    plan = registry.named(backend).traits.plan_type
    for type_ in (Problem, Epilogue, plan, Tile, Work, Result):
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
def _found(target: PlanningDevice, backend: str) -> Results:
    if os.environ.get(ENVIRONMENT) == "0" or stands_for_another(backend):
        return {}
    results_folder = folder()
    if not os.path.isdir(results_folder):  # False without access, unlike Path.is_dir
        return {}
    return read(results_folder, machine(target, backend))


def _read(file: Path, here: Machine, complaints: list[str]) -> Results:
    import json

    try:
        if reason := cache.why_untrusted(file):
            raise PermissionError(reason)
        data = json.loads(regular_files.read(file))
        rows = [*data["results"]]
        if measurement.machine_of(data["machine"]) != here:
            raise ValueError("they belong to another machine")
    except FileNotFoundError:
        return {}
    except (OSError, RecursionError, *DECODE_ERRORS) as error:
        complaints.append(f"{type(error).__name__}: {error}")
        return {}
    results: Results = {}
    for row in rows:
        try:
            result = measurement.result(row, registry.plan_type)
        except DECODE_ERRORS as error:
            complaints.append(f"{type(error).__name__}: {error}")
        else:
            results[result.plan.problem] = result
    return results


def _text(here: Machine, results: Results) -> str:
    import json

    ordered = sorted(results.values(), key=lambda result: _order(result.plan.problem))
    data = {
        "machine": measurement.machine_row(here),
        "results": [measurement.row(result) for result in ordered],
    }
    return json.dumps(data, indent=1) + "\n"


def _order(problem: Problem) -> tuple[int, int, int, str]:
    return problem.n, problem.k, problem.m, repr(problem)
