"""The search for a plan, the same for every back end.

A back end yields candidates with their predictions. The search returns the plan with
the lowest rank.
"""

from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.prediction import Prediction

MODEL_ERROR = 0.06
"""Relative error of the cost models against published and measured times. Split tiles
must be predicted to gain more than this."""


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


def best(candidates: Iterable[Candidate]) -> Candidate:
    """Returns the one with the lowest rank of at least one candidate."""
    return min(candidates, key=itemgetter(0))


def ranked(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Returns the candidates with different plans, ordered by rank."""
    ordered = sorted(candidates, key=itemgetter(0))
    return (*{candidate.plan: candidate for candidate in ordered}.values(),)


def split_factor(is_split: bool) -> float:
    """Returns the factor on a predicted time: split tiles must gain `MODEL_ERROR`."""
    return 1 + MODEL_ERROR * is_split
