"""The checks of kernels on this machine."""

import os
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mlx_marlin.planning.problem import Problem
from mlx_marlin.progress import shown

if TYPE_CHECKING:
    from mlx_marlin.guard.verdicts import Verdict


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
