"""Runs checks of kernels and keeps their verdicts, in memory and on disk."""

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial

import mlx.core as mx

from mlx_marlin import state
from mlx_marlin.backends import selection, source
from mlx_marlin.backends.launch import Launch, digest
from mlx_marlin.decision_log import Explained
from mlx_marlin.guard import verdicts
from mlx_marlin.guard.reference import KernelError
from mlx_marlin.guard.verdicts import Verdict
from mlx_marlin.warn_once import warn_once

TRANSIENT = (
    "out of memory",
    "insufficient memory",
    "unable to allocate",
    "cannot allocate memory",
    "no space left on device",
    "disk quota exceeded",
    "cannot open source file",  # NVRTC, of a header
    "could not open source file",
    "cannot open shared object file",
    "failed to open libnvrtc",
)
"""Parts of error messages, in lower case, whose cause is not the kernel."""

raises_mistakes = False
"""Whether an error that is a check's own is raised, as in our tests, or told."""

_verdicts: dict[str, Verdict] = state.register({})


def verdicts_so_far() -> dict[str, Verdict]:
    """Returns the verdicts of this process by the digest of their launches."""
    return dict(_verdicts)


def verdict(
    launches: tuple[Launch, ...], plan: Explained, check: Callable[[], str | None]
) -> Verdict:
    """Returns the verdict on the kernels of launches; checks them if there is none yet.

    `plan` uses them; `check` runs the kernels and returns what is wrong, or None.
    """
    key = digest(launches)
    if key not in _verdicts:
        file = verdicts.machine_folder(selection.backend()) / f"{key}.json"
        known = verdicts.read(file)
        if known is None or known.state == "started":
            new = partial(_new_verdict, launches, plan)
            started, run = new("started", ""), partial(_state_and_fault, check)
            known = verdicts.checked(file, started, lambda: new(*run()), _suspect)
        if known.shaders != source.digest_of_shaders():
            # Written by another version of this package with the same kernels.
            known = replace(known, shaders=source.digest_of_shaders())
            verdicts.write(file, known)
        _verdicts[key] = known
        _warn(known)
    return _verdicts[key]


def known(launches: tuple[Launch, ...]) -> Verdict | None:
    """Returns the verdict on the kernels of launches; None if there is none yet."""
    key = digest(launches)
    if key in _verdicts:
        return _verdicts[key]
    stored = verdicts.read(verdicts.machine_folder(selection.backend()) / f"{key}.json")
    # "started" may be a check in progress in another process, and is no verdict.
    return stored if stored is not None and stored.state != "started" else None


def _state_and_fault(check: Callable[[], str | None]) -> tuple[str, str]:
    try:
        with mx.stream(_device()):
            fault = check()
    except KernelError as raised:
        error = raised.__cause__
        assert isinstance(error, Exception)
        return "undecided" if _is_transient(error) else "failed", _first_line(error)
    except Exception as error:  # says nothing about the kernel
        if _is_transient(error):
            return "undecided", _first_line(error)
        if raises_mistakes:
            raise
        return "undecided", f"the check has a mistake: {_first_line(error)}"
    return ("failed", fault) if fault else ("passed", "")


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"


def _is_transient(error: Exception) -> bool:
    """Returns whether a check failed for lack of memory, disk space or a tool chain.

    The same kernel may pass in the next process. Any other error is attributed to the
    kernel, which must not run again.
    """
    if isinstance(error, MemoryError | OSError | ImportError):
        return True
    text = str(error).lower()
    return any(part in text for part in TRANSIENT)


def record_failure(launches: tuple[Launch, ...], plan: Explained, fault: str) -> None:
    """Stores a failed verdict on the kernels of launches, and warns."""
    key = digest(launches)
    failed = _new_verdict(launches, plan, "failed", fault)
    _verdicts[key] = failed
    file = verdicts.machine_folder(selection.backend()) / f"{key}.json"
    verdicts.write(file, failed)
    _warn(failed)


def _new_verdict(
    launches: tuple[Launch, ...], plan: Explained, state: str, fault: str
) -> Verdict:
    return Verdict(
        kernels=" and ".join(launch.source.name for launch in launches),
        state=state,
        fault=fault,
        example=plan.explain(),
        date=date.today().isoformat(),
        shaders=source.digest_of_shaders(),
        version=verdicts.version(),
    )


def reason(verdict: Verdict) -> str | None:
    """Returns why the kernels of a verdict must not be used; None if they passed."""
    if verdict.failure is None:
        return None
    if verdict.state == "undecided":
        return f"the kernel {verdict.kernels} could not be checked: {verdict.failure}"
    return (
        f"the kernel {verdict.kernels} failed its check on this machine: "
        f"{verdict.failure}"
    )


def _warn(verdict: Verdict) -> None:
    """Warns about a failed check, once per process and kernel."""
    if verdict.failure is None:
        return
    advice = (
        "The next process checks it again"
        if verdict.state == "undecided"
        else f"`mlx-marlin cache --forget {verdict.names[0]}` has it checked again. "
        "Please report this line with the output of `mlx-marlin doctor --json`"
    )
    warn_once(
        f"failed: {verdict.kernels}",
        f"{reason(verdict)}. Stock MLX or another kernel serves in its place, with "
        f"right results. {advice} (docs/troubleshooting.md)",
    )


def _suspect(verdict: Verdict) -> None:
    warn_once(
        f"suspected: {verdict.kernels}, {verdict.example}",
        f"{verdicts.SUSPECTED} of the kernel {verdict.kernels}, which may have caused "
        f"it. The kernel is checked again now, alone. If this process ends too, it is "
        f"not used any more (docs/troubleshooting.md)",
    )


def _device() -> mx.Device:
    """Returns the device that kernels run on."""
    return mx.Device(mx.gpu if mx.is_available(mx.Device(mx.gpu)) else mx.cpu)
