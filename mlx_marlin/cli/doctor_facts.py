"""The facts that `mlx-marlin doctor` reports, as values that JSON can represent.

A section that cannot be collected is a mapping with the key "error", so that an error
in one section does not hide the others.
"""

import os
import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_marlin import cache, regular_files
from mlx_marlin.cli import cache as cache_command
from mlx_marlin.cli import installation
from mlx_marlin.planning.problem import Problem
from mlx_marlin.progress import shown

if TYPE_CHECKING:
    from mlx_marlin.guard.verdicts import Verdict

Facts = dict[str, Any]


def collect() -> Facts:
    """Returns all facts, with the conclusion under "problems" and "ok"."""
    facts: Facts = {
        "versions": _guarded(installation.versions),
        "environment": installation.environment(),
        "device": _guarded(device_facts),
        "back_end": _guarded(back_end),
        "compilers": _guarded(installation.compilers),
        "cache": _guarded(cache_facts),
        "tuned": _guarded(measured_results),
        "verdicts": _guarded(verdicts),
    }
    facts["problems"] = problems(facts)
    facts["ok"] = not facts["problems"]
    return facts


def device_facts() -> Facts:
    """Returns the device for which plans are made."""
    from mlx_marlin.backends import devices

    here = devices.current()
    facts = {
        "name": here.name,
        "variant": here.variant,
        "figures": here.figures,
        "cores": here.cores,
        "architecture": here.arch,
        "source": _source_of_device(),
    }
    own = ("generation", "tier", "shared_bytes")
    return facts | {name: getattr(here, name) for name in own if hasattr(here, name)}


def back_end() -> Facts:
    """Returns the back end, why it was selected, and why it cannot run, if so."""
    import mlx.core as mx

    import metal_emulator
    from mlx_marlin.backends import selection
    from mlx_marlin.products import this_machine

    name, reason = selection.choice()
    facts: Facts = {
        "name": name,
        "reason": reason,
        "default_device": str(mx.default_device()),
        "metal": mx.metal.is_available(),
        "cuda": mx.cuda.is_available(),
        "problem": selection.missing(),
    }
    if name == "stock":
        facts["problem"] = f"stock MLX serves every call, because {reason}"
    if name == "cuda" and facts["problem"] is None:
        facts["problem"] = this_machine.device().unsupported
    if name == "emulator" and (missing := metal_emulator.unavailable()) is not None:
        facts["problem"] = f"the emulator cannot run: {missing}"
    return facts


def cache_facts() -> Facts:
    """Returns the root of the cache and its folders."""
    root = cache.root()
    folders = [cache_command.describe(root), *cache_command.listed()]
    return {"root": str(root), "folders": [*map(asdict, folders)]}


def measured_results() -> Facts:
    """Returns the files of measured results, and what was measured on this machine."""
    from mlx_marlin import warn_once
    from mlx_marlin.backends import measured_results as measured
    from mlx_marlin.backends import result_files, selection
    from mlx_marlin.lm import measured_models
    from mlx_marlin.lm.race.settings import name_of
    from mlx_marlin.products import this_machine

    warn_once.forget()
    folder = result_files.folder()
    machine = measured.machine(this_machine.device(), selection.choice()[0])
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stored = result_files.read(folder, machine) if files else result_files.Stored()
        settings = [*measured_models.decoded(stored.settings.values(), folder)]
    products, models = stored.results.values(), stored.forwards.values()
    return {
        "folder": str(folder),
        "on": os.environ.get(measured.ENVIRONMENT) != "0",
        "products": _measured(products, lambda each: each.stock),
        "models": _measured(models, lambda each: bool(each.stock_rows)),
        "variable": measured_models.VARIABLE,
        "value_here": os.environ.get(measured_models.VARIABLE),
        "settings": [
            {
                "model": each.model,
                "settings": name_of(each.settings),
                "reason": each.reason,
                "max_ops_per_buffer": each.max_ops_per_buffer,
            }
            for each in settings
        ],
        "ignored": [str(warning.message) for warning in caught],
        "files": [
            {
                "name": file.name,
                "results": _count(file),
                "this_machine": file.name == machine.file_name,
            }
            for file in files
        ],
    }


def _measured(found: Collection[Any], has_stock: Callable[[Any], bool]) -> Facts:
    """Returns how much was measured, how much stock MLX serves of it, and when."""
    dates = [each.date for each in found]
    return {
        "count": len(found),
        "served_by_stock": sum(map(has_stock, found)),
        "first": min(dates, default=None),
        "last": max(dates, default=None),
    }


def problems(facts: Facts) -> list[str]:
    """Returns the reasons why our kernels cannot run, one sentence each."""
    found = [
        f"{name}: {facts[name]['error']}"
        for name in ("versions", "device", "back_end", "cache", "verdicts")
        if "error" in facts[name]
    ]
    back = facts["back_end"]
    if back.get("problem"):
        found.append(f"our kernels cannot run: {back['problem']}")
    for folder in facts["cache"].get("folders", ()):
        if folder["problem"]:
            found.append(f"the cache folder {folder['path']} {folder['problem']}")
    for kernel in facts["verdicts"].get("kernels", ()):
        if not kernel["passed"]:
            found.append(f"{kernel['kernel']} {failure(kernel)}")
    return found


def _guarded(collector: Callable[[], Facts]) -> Facts:
    """Returns a section of facts, or its error instead of raising it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the facts contain them
            return collector()
    except ImportError as error:
        return {"error": installation.why_missing(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _source_of_device() -> str:
    from mlx_marlin.backends import devices
    from mlx_marlin.backends.metal import device

    if os.environ.get(devices.ENVIRONMENT):
        return f"set by {devices.ENVIRONMENT}"
    if devices.current().name == device.DEFAULT.name:
        return "default: no GPU was found"
    return "detected"


def _count(file: Path) -> int | None:
    """Returns the number of results in a file, or None if it cannot be read."""
    with suppress(OSError, ValueError), regular_files.decoding():
        return len(cache.read_json(file)["results"])
    return None


def verdicts() -> dict[str, Any]:
    """Returns the stored verdicts on kernels of this machine."""
    from mlx_marlin import guard

    return {
        "on": guard.is_on(),
        "setting": os.environ.get(guard.ENVIRONMENT),
        "kernels": [*map(_verdict, guard.verdicts_so_far())],
    }


def check(products: Iterable[Problem]) -> list[dict[str, Any]]:
    """Checks the kernels that serve products on this machine, with a progress bar.

    The verdicts are stored; `verdicts` returns them.
    """
    from mlx_marlin import guard
    from mlx_marlin.backends import selection
    from mlx_marlin.products import serving
    from mlx_marlin.products.serving import Refusal

    missing = selection.missing()
    if missing or selection.backend() == "stock":
        raise ValueError(f"--check: {missing or selection.choice()[1]}")
    served_by_stock: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the verdicts contain them
        for problem in shown([*products], "check", "product"):
            target = serving.here(guard.fault_of)
            answer = serving.serve_problem(problem, target)
            if isinstance(answer, Refusal) and answer.cause != "fault":
                row = {"product": problem.explain(), "reason": answer.reason}
                served_by_stock.append(row)
    return served_by_stock


def _verdict(verdict: "Verdict") -> dict[str, Any]:
    return {
        "kernel": verdict.kernels,
        "passed": verdict.failure is None,
        "state": verdict.state,
        "reason": verdict.failure,
        "example": verdict.example,
        "date": verdict.date,
    }


def when_unchecked(setting: str | None) -> str:
    """Returns a sentence for a machine where calls run kernels without a check."""
    from mlx_marlin import guard

    here = (
        f"{guard.ENVIRONMENT}={setting} is set"
        if setting
        else f"set {guard.ENVIRONMENT}=1 to change that"
    )
    return f"only --check checks kernels here, calls run them unchecked ({here})"


def failure(kernel: dict[str, Any]) -> str:
    """Returns how and why the check of a kernel failed."""
    if kernel["state"] in ("started", "undecided"):
        return f"could not be checked: {kernel['reason']}"
    return f"failed its check: {kernel['reason']}"
