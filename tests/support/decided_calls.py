"""What calls of layers decide, without running them."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from mlx_marlin import decision_log, state
from mlx_marlin.backends import devices, selection
from mlx_marlin.products import this_machine


def on_a_mac(patch: pytest.MonkeyPatch, chip: str) -> None:
    """Decides as with a chip in this machine, for speed too; nothing can run."""
    patch.setattr(devices, "current", lambda *_: devices.named(chip))
    with_a_gpu(patch)


def with_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Decides as where our kernels and stock MLX run on one GPU; nothing can run."""
    patch.setattr(selection, "may_hand_over", lambda: True)
    patch.setattr(this_machine, "why_not", lambda _: None)


class Decided(Exception):  # noqa: N818 (no error)
    """Ends a call as soon as it is decided who serves it."""

    def __init__(self, answer: Any) -> None:
        super().__init__(answer)
        self.answer = answer


def decided(call: Callable[[], object]) -> str:
    """Returns what a call decides: the plan's explanation, or the reason."""

    def ours(_: Any, plan: Any) -> None:
        raise Decided(plan.explain())

    def stock(_: Any, reason: str) -> None:
        raise Decided(reason)

    state.reset()
    with patch.multiple(decision_log, ours=ours, stock=stock):
        try:
            call()
        except Decided as found:
            return str(found.answer)
    raise AssertionError("nothing was decided")
