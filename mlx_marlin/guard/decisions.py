"""Whether a plan's kernels may be used on this machine.

What checks kernels is imported by the first check, because it takes a third of the time
of a first call.
"""

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_marlin import state
from mlx_marlin.backends import kernels, selection
from mlx_marlin.backends.launch import Launch, distinct

if TYPE_CHECKING:
    from mlx_marlin.guard.verdicts import Verdict

ENVIRONMENT = "MLX_MARLIN_GUARD"


def is_on() -> bool:
    """Returns whether kernels are checked before they are used.

    They are not if the device is missing, where graphs can be built and exported but
    not run.
    """
    setting = os.environ.get(ENVIRONMENT, "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"{ENVIRONMENT}={setting!r}, expected 0, 1 or nothing")
    backend = selection.backend()
    if kernels.are_deferred():
        return False  # nothing is evaluated, and decisions are dropped afterwards
    if setting == "0" or backend == "stock" or selection.missing() is not None:
        return False
    return setting == "1" or backend in selection.ON_GPU


def why_not(plan: Any) -> str | None:
    """Returns why a plan's kernels must not be used on this machine; None if they may.

    The first call for some launches compiles and checks their kernels.
    """
    return fault_of(plan) if is_on() else None


def fault_of(plan: Any) -> str | None:
    """Returns what `why_not` does, also where the guard is off."""
    from mlx_marlin.guard import checks

    return checks.reason(verdict_of(plan))


@state.cache(maxsize=256)
def remembered_fault(plan: Any) -> str | None:
    """Returns what `why_not` does, and remembers it: for calls that build a graph."""
    return why_not(plan)


def known_fault(plan: Any) -> str | None:
    """Returns what an earlier check found wrong with a plan's kernels, or None.

    Unlike `why_not`, it runs nothing: kernels that nobody has checked have no fault.
    """
    if not is_on():
        return None
    from mlx_marlin.guard import checks

    probes = selection.of_plan(plan).probes(plan)
    for launches in (*((probe.launch,) for probe in probes), _launches(plan)):
        known = checks.known(launches)
        reason = None if known is None else checks.reason(known)
        if reason is not None:
            return reason
    return None


def verdict_of(plan: Any) -> "Verdict":
    """Returns the verdict on a plan's kernels; the first call for them checks them.

    It is the one on a probe that a kernel depends on, if that failed.
    """
    from mlx_marlin.guard import checks, known_answers

    for probe in selection.of_plan(plan).probes(plan):
        check = partial(known_answers.fault_of_probe, probe)
        verdict = checks.verdict((probe.launch,), plan, check)
        if verdict.failure is not None:
            return verdict
    check = partial(known_answers.fault_of, plan)
    return checks.verdict(_launches(plan), plan, check)


def condemn(plan: Any, fault: str) -> None:
    """Records that a plan's kernels gave a wrong result, and warns."""
    if is_on():
        from mlx_marlin.guard import checks

        checks.record_failure(_launches(plan), plan, fault)


def verdicts_so_far() -> "list[Verdict]":
    """Returns the verdicts on this machine's disk and of this process, sorted.

    Verdicts on kernels that only other versions of this package have are omitted.
    """
    from mlx_marlin.backends import source
    from mlx_marlin.guard import checks, verdicts

    stored = verdicts.stored(verdicts.machine_folder(selection.backend()))
    current = source.digest_of_shaders()
    found = (stored | checks.verdicts_so_far()).values()
    return sorted(
        (verdict for verdict in found if verdict.shaders == current),
        key=lambda verdict: (verdict.kernels, verdict.example),
    )


def _launches(plan: Any) -> tuple[Launch, ...]:
    return distinct(selection.of_plan(plan).launches(plan))
