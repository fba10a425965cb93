"""The search for a plan, the same for every back end.

A back end yields candidates with their predictions. The search returns the plan with
the lowest rank.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple

from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.prediction import Prediction

MODEL_ERROR = 0.06
"""Relative error of the cost models against published and measured times. Split tiles
must be predicted to gain more than this."""

BestSoFar = Callable[[], float]
"""Returns the first value of the lowest rank so far. A back end may omit those that
cannot have a lower one."""


class Candidate(NamedTuple):
    """A plan and its prediction."""

    rank: tuple[float, ...]
    """Sort key; the lowest is best."""
    prediction: Prediction
    """Predicted times of the plan."""
    plan: Plan
    """The plan."""

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return self.prediction.seconds


def best(offer: Callable[[BestSoFar], Iterable[Candidate]]) -> Plan:
    """Returns the plan with the lowest rank.

    Args:
        offer: Yields the candidates, at least one, given `BestSoFar`.
    """
    least: list[Candidate] = []
    for candidate in offer(lambda: least[0].rank[0] if least else inf):
        if not least or candidate.rank < least[0].rank:
            least[:] = [candidate]
    return least[0].plan


def ranked(
    offer: Callable[[BestSoFar], Iterable[Candidate]],
) -> tuple[Candidate, ...]:
    """Returns all candidates with different plans, ordered by rank.

    Args:
        offer: Yields the candidates, at least one, given `BestSoFar`.
    """
    found: dict[Plan, Candidate] = {}
    for candidate in sorted(offer(lambda: inf), key=lambda each: each.rank):
        found[candidate.plan] = candidate
    return (*found.values(),)


def split_factor(is_split: bool) -> float:
    """Returns the factor on a predicted time: split tiles must gain `MODEL_ERROR`."""
    return 1 + MODEL_ERROR * is_split
