"""Measured results that beat the model: reading and writing them, one file a machine.

`mlx-marlin tune` writes, `dispatch` asks. A file is JSON, named after what the times
depend on, so that another MLX, system or kernel text finds none. What cannot be
understood counts as absent, with one warning. `MLX_MARLIN_TUNED=0` reads nothing.
"""

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

from mlx_marlin import cache, state
from mlx_marlin.backends import devices, registry
from mlx_marlin.backends.source import shader_folder
from mlx_marlin.planning import measurement
from mlx_marlin.planning.device import PlanningDevice
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.measurement import DECODE_ERRORS, Machine, Result
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work import Tile, Work

ENVIRONMENT = "MLX_MARLIN_TUNED"
"""Set to 0, nothing that was measured is read."""
TEXTS = (".metal", ".cu", ".cuh")
"""Files of kernels."""
Results = dict[Problem, Result]


def folder() -> Path:
    """Returns the folder of all results; it may not exist."""
    return cache.folder("tuned")


def machine(target: PlanningDevice, backend: str) -> Machine:
    """Returns what times depend on here.

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
        kernels=_kernels(),
    )


def stands_for_another(backend: str) -> bool:
    """Whether plans are made for a chip that is named, not for the one that runs them.

    Times of this chip then say nothing of that one.
    """
    return backend != "emulator" and bool(os.environ.get(devices.ENVIRONMENT))


def find(problem: Problem, target: PlanningDevice, backend: str) -> Result | None:
    """Returns what was measured here for a problem, if anything was.

    Files are read at the first call, once per process. An epilogue makes no difference,
    because products are measured without one, but where two columns make a result,
    which needs a plan of its own. Products of rows that are normalized are not
    measured.

    Args:
        problem: The product to compute.
        target: As for `machine`.
        backend: "metal", "cuda" or "emulator".
    """
    if problem.epilogue.is_paired:
        return None
    found = _found(target, backend).get(replace(problem, epilogue=PLAIN))
    return found and replace(found, plan=replace(found.plan, problem=problem))


def read(place: Path, here: Machine) -> Results:
    """Reads a machine's results; what is not valid is left out, with one warning.

    Args:
        place: The folder of all results.
        here: The machine.
    """
    complaints: list[str] = []
    results = _read(place / here.file_name, here, complaints)
    if complaints:
        more = f" (and {len(complaints) - 1} more)" if complaints[1:] else ""
        warnings.warn(
            f"mlx_marlin: tuned results in {place / here.file_name} are ignored: "
            f"{complaints[0]}{more}; `mlx-marlin tune` measures them anew",
            RuntimeWarning,
            stacklevel=2,
        )
    return results


def write(place: Path, here: Machine, results: Iterable[Result]) -> Path:
    """Adds results to a machine's file, in place of older ones for the same problems.

    Several processes may do so at once: none loses what another wrote.

    Args:
        place: The folder of all results; made if it is missing.
        here: The machine.
        results: What was measured.

    Returns:
        The file.

    Raises:
        OSError: If the folder cannot be written to, or is not trusted.
    """
    with locked(place):
        merged = read(place, here) | {each.plan.problem: each for each in results}
        # At once: a reader takes no lock.
        return cache.write(place, here.file_name, _text(here, merged).encode())


def clear(place: Path) -> int:
    """Removes the results of every machine and returns how many files there were."""
    if not place.is_dir():
        return 0
    with locked(place):
        files = list(place.glob("*.json"))
        for file in files:
            file.unlink()
    return len(files)


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """Keeps other writers out of a folder, which is made if it is missing.

    Raises:
        OSError: If the folder cannot be written to, or is not trusted.
    """
    import fcntl

    cache.make(place)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@state.cache(maxsize=8)
def _found(target: PlanningDevice, backend: str) -> Results:
    if os.environ.get(ENVIRONMENT) == "0" or stands_for_another(backend):
        return {}
    place = folder()
    if not os.path.isdir(place):  # unlike Path's, False where it may not be asked
        return {}
    return read(place, machine(target, backend))


@lru_cache(maxsize=1)
def _kernels() -> str:
    """Returns a digest of every kernel's text and of the fields of a plan."""
    import hashlib

    digest = hashlib.sha256()
    root = shader_folder()
    texts = (each for each in root.rglob("*") if each.suffix in TEXTS)
    for path in sorted(texts):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    plans = (each.plan_type for each in registry.BACKENDS)
    for kind in (Problem, Epilogue, *plans, Tile, Work, Result):
        names = [each.name for each in fields(kind)]
        digest.update(f"{kind.__name__} {names}".encode())
    return digest.hexdigest()[:16]


def _read(file: Path, here: Machine, complaints: list[str]) -> Results:
    import json

    try:
        if reason := cache.why_untrusted(file):
            raise PermissionError(reason)
        data = json.loads(file.read_text("utf-8"))
        rows = [*data["results"]]
        if measurement.machine_of(data["machine"]) != here:
            raise ValueError("they are another machine's")
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

    ordered = sorted(results.values(), key=lambda each: _order(each.plan.problem))
    data = {
        "machine": measurement.machine_row(here),
        "results": [measurement.row(each) for each in ordered],
    }
    return json.dumps(data, indent=1) + "\n"


def _order(problem: Problem) -> tuple[int, int, int, str]:
    return problem.n, problem.k, problem.m, repr(problem)
