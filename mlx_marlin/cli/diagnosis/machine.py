"""What `mlx-marlin doctor` finds: facts about this installation, as plain data.

Every function returns what JSON can hold. A part that cannot be looked at is a mapping
with the key "error", so that one broken part does not hide the others.
"""

import json
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_marlin.backends.metal import detection
from mlx_marlin.cli.diagnosis import folders
from mlx_marlin.planning.problem import Problem

if TYPE_CHECKING:
    from mlx_marlin.guard import Verdict

Facts = dict[str, Any]

PACKAGES = ("mlx-marlin", "mlx", "mlx-lm")
"""Distributions whose versions are reported."""
VARIABLES = ("MLX_", "CUDA_VISIBLE_DEVICES")
"""Prefixes of the environment variables that are reported."""
CLANG = re.compile(r"clang(-\d+)?")
"""Names of compilers that the emulator may use."""


def collect() -> Facts:
    """Returns all facts, with the conclusion under "problems" and "ok"."""
    facts: Facts = {
        "versions": _guarded(versions),
        "environment": environment(),
        "device": _guarded(device_facts),
        "back_end": _guarded(back_end),
        "compilers": _guarded(compilers),
        "cache": _guarded(folders.collect),
        "tuned": _guarded(tuned_results),
        "verdicts": _guarded(verdicts),
    }
    facts["problems"] = problems(facts)
    facts["ok"] = not facts["problems"]
    return facts


def version_line() -> str:
    """Returns our version, and those of MLX and mlx-lm if they are installed."""
    ours, *others = ((name, _version(name)) for name in PACKAGES)
    found = [f"{name} {version}" for name, version in others if version]
    text = f"{ours[0]} {ours[1] or '(not installed)'}"
    return f"{text} ({', '.join(found)})" if found else text


def versions() -> Facts:
    """Returns the versions of Python, of the packages and of the system."""
    found: Facts = {name: _version(name) for name in PACKAGES}
    return {
        "python": platform.python_version(),
        **found,
        "system": _system(),
        "build": detection.os_build(),
        "machine": platform.machine(),
    }


def environment() -> dict[str, str]:
    """Returns the variables that change what MLX and this package do."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(VARIABLES)
    }


def device_facts() -> Facts:
    """Returns the device that plans are made for."""
    from mlx_marlin.backends import devices
    from mlx_marlin.backends.cuda.device import CudaDevice
    from mlx_marlin.backends.metal.device import Device

    here = devices.current()
    facts = {
        "name": here.name,
        "variant": here.variant,
        "figures": here.figures,
        "cores": here.cores,
        "architecture": here.arch,
        "source": _source_of_device(),
    }
    if isinstance(here, Device):
        tier = {"generation": here.generation, "tier": here.tier}
        return facts | {"kind": "apple"} | tier
    assert isinstance(here, CudaDevice)
    return facts | {"kind": "cuda", "shared_bytes": here.shared_bytes}


def back_end() -> Facts:
    """Returns what runs our kernels, why, and what prevents it."""
    import mlx.core as mx

    from mlx_marlin.backends import selection
    from mlx_marlin.products import eligibility

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
        facts["problem"] = eligibility.unsupported_device()
    if name == "emulator":
        facts["problem"] = _emulator_problem()
    return facts


def compilers() -> Facts:
    """Returns the C++ compilers that are found, and the one that the emulator uses."""
    from mlx_marlin import emulator
    from mlx_marlin.emulator.compiling import compiler

    used = compiler.find()
    return {
        "found": [*_on_path(), *_wheel()],
        "used": None if used is None else " ".join(used.clang),
        "identity": None if used is None else used.identity,
        "unavailable": emulator.unavailable(),
    }


def tuned_results() -> Facts:
    """Returns the files of tuned results, and how many results serve this machine."""
    from mlx_marlin.backends import selection
    from mlx_marlin.backends import tuned_results as tuned
    from mlx_marlin.products import eligibility

    place = tuned.folder()
    here = tuned.machine(eligibility.target(), selection.choice()[0])
    files = sorted(place.glob("*.json")) if place.is_dir() else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = len(tuned.read(place, here)) if files else 0
    return {
        "folder": str(place),
        "on": os.environ.get(tuned.ENVIRONMENT) != "0",
        "usable": usable,
        "ignored": [str(each.message) for each in caught],
        "files": [
            {
                "name": each.name,
                "results": _count(each),
                "this_machine": each.name == here.file_name,
            }
            for each in files
        ],
    }


def verdicts() -> Facts:
    """Returns the verdicts on kernels that are known on this machine."""
    from mlx_marlin import guard

    return {"on": guard.is_on(), "kernels": [*map(_verdict, guard.verdicts_so_far())]}


def check(wanted: Iterable[Problem]) -> list[Facts]:
    """Checks the kernels that serve products here, with a progress bar.

    The verdicts are kept, so `verdicts` has them.

    Args:
        wanted: The products.

    Returns:
        The products that stock MLX serves by decision, each with the reason: they need
        no kernel of ours.

    Raises:
        ValueError: If kernels cannot be checked here.
    """
    from tqdm import tqdm

    from mlx_marlin import guard
    from mlx_marlin.backends import selection
    from mlx_marlin.products import dispatch

    lacking = selection.missing()
    if lacking or selection.backend() == "stock":
        raise ValueError(f"--check: {lacking or selection.choice()[1]}")
    of_stock: list[Facts] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the verdicts tell it
        for problem in tqdm([*wanted], "check", unit="product"):
            plan = dispatch.plan_of(problem)
            if isinstance(plan, str):
                of_stock.append({"product": problem.explain(), "reason": plan})
            else:
                guard.verdict_of(plan)
    return of_stock


def _verdict(verdict: "Verdict") -> Facts:
    return {
        "kernel": verdict.kernels,
        "passed": verdict.failure is None,
        "state": verdict.state,
        "reason": verdict.failure,
        "example": verdict.example,
        "date": verdict.date,
    }


def problems(facts: Facts) -> list[str]:
    """Returns what prevents our kernels from running, a sentence each."""
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
    for each in facts["verdicts"].get("kernels", ()):
        if not each["passed"]:
            found.append(f"{each['kernel']} {failure(each)}")
    return found


def failure(kernel: Facts) -> str:
    """Returns how the check of a kernel failed, and the reason."""
    if kernel["state"] == "undecided":
        return f"could not be checked: {kernel['reason']}"
    return f"failed its check: {kernel['reason']}"


def _guarded(collector: Callable[[], Facts]) -> Facts:
    """Returns facts, or what went wrong: a report must not end in a traceback."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the facts tell it
            return collector()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _source_of_device() -> str:
    from mlx_marlin.backends import devices
    from mlx_marlin.backends.metal import device

    if os.environ.get(devices.ENVIRONMENT):
        return f"named by {devices.ENVIRONMENT}"
    if devices.current().name == device.DEFAULT.name:
        return "no GPU was found: a stand-in"
    return "detected"


def _emulator_problem() -> str | None:
    from mlx_marlin import emulator

    reason = emulator.unavailable()
    return None if reason is None else f"the emulator cannot run: {reason}"


def _on_path() -> list[str]:
    """Returns the clangs of the search path, in its order."""
    found: dict[str, None] = {}
    for folder in os.get_exec_path():
        names = os.listdir(folder) if os.path.isdir(folder) else []
        for name in sorted(filter(CLANG.fullmatch, names)):
            if (path := shutil.which(name, path=folder)) is not None:
                found[path] = None
    return [*found]


def _wheel() -> list[str]:
    version = _version("ziglang")
    return [] if version is None else [f"the wheel ziglang {version}"]


def _count(file: Path) -> int | None:
    """Returns how many results a file has; None if it cannot be read."""
    try:
        return len(json.loads(file.read_text("utf-8"))["results"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
