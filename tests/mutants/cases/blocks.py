"""Calls of a decoder block's other kernels on which a planted bug must show."""

from collections.abc import Callable
from dataclasses import replace

from support import cuda_experts, launches, orders
from support.block_kernels import Added, Rotated
from support.cuda_experts import Choice


class ChosenCase:
    """Experts that a row chooses, and the sum of what they return."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run

    def arrays(self) -> tuple[()]:
        return ()

    def wrong_result(self) -> str | None:
        """What is chosen, its scores and the sum, in float64."""
        try:
            self.run()
        except AssertionError:
            return "another choice, score or sum"
        return None


def _choose_and_add(choice: Choice) -> None:
    choice.check(launches.route)
    choice.check_sum(launches.combine)


BLOCK_CASES = {
    "heads of two tokens of three streams, with norms": Rotated(
        streams=3,
        tokens=2,
        heads=3,
        kv_heads=2,
        features=40,
        dtype="float16",
        norm=0.1,
        factor=1.25,
        first=(5, 0, 70_031),
    ),
    "heads of streams with one position": Rotated(
        streams=2, tokens=1, heads=2, kv_heads=1, features=70, dtype="float32"
    ),
    "rows that are added and normalized": Added(
        rows=3, n=1029, dtype="float16", epsilon=0.5
    ),
    "experts that rows choose, and their sum": ChosenCase(
        lambda: _choose_and_add(cuda_experts.ROUTINGS[1])
    ),
    "experts that rows of float32 logits choose": ChosenCase(
        lambda: replace(cuda_experts.ROUTINGS[0], dtype="float32").check(launches.route)
    ),
    "results of eight experts, added in their order": ChosenCase(
        lambda: orders.check_sum_of_experts(launches.combine)
    ),
    "experts that rows with NaN and zeros of both signs choose": ChosenCase(
        lambda: cuda_experts.SPECIAL_ROUTINGS[0].check(launches.route)
    ),
}
