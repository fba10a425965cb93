"""`MLX_MARLIN_LOG=1`: a line on standard error for each decision of who serves a call.

Decisions are remembered, so a warm call writes nothing and does not ask.
"""

import os
import sys
from typing import Protocol

from mlx_marlin import state

ENVIRONMENT = "MLX_MARLIN_LOG"


class Explained(Protocol):
    """A call or a plan that describes itself."""

    def explain(self) -> str:
        """Returns a one-line description."""


@state.cache()
def is_on() -> bool:
    """Returns whether decisions are logged."""
    setting = os.environ.get(ENVIRONMENT, "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"{ENVIRONMENT}={setting!r}, expected 0, 1 or nothing")
    return setting == "1"


def ours(call: Explained, plan: Explained) -> None:
    """Logs that our kernels serve a call with a plan."""
    if is_on():
        tell(f"{call.explain()}: our kernels: {plan.explain()}")


def stock(call: Explained, reason: str) -> None:
    """Logs that stock MLX serves a call, and the reason."""
    if is_on():
        tell(f"{call.explain()}: stock MLX: {reason}")


def measured(model: str, settings: str) -> None:
    """Logs that measured settings are used for a model."""
    if is_on():
        tell(f"{model}: measured settings, {settings}")


def tell(line: str) -> None:
    """Writes a line that begins with the package's name to standard error."""
    if sys.stderr is not None:  # as for a process without a console
        print(f"mlx_marlin: {line}", file=sys.stderr, flush=True)
