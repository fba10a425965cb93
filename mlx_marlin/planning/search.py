"""The only loop over candidates: it is the same for every back end.

A back end offers options, with what the model says about each; the best one whose plan
is valid is chosen.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple

from mlx_marlin.planning.choice import Candidate
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.prediction import Prediction

MODEL_ERROR = 0.06
"""How far the cost models are from published and measured times; a split must gain more
than this."""

Limit = Callable[[], float]
"""Returns the first value of the best rank so far: an option that cannot have a lower
one need not be offered."""


class Option(NamedTuple):
    """A candidate before its plan is made: many are compared and few are made."""

    rank: tuple[float, ...]
    """What options are compared by: less is better."""
    prediction: Prediction
    """What the model says about the plan."""
    plan: Callable[[], Plan]
    """Makes the plan; raises a ValueError if there is none after all."""


def best(offer: Callable[[Limit], Iterable[Option]]) -> Plan:
    """Returns the valid plan with the lowest rank.

    Args:
        offer: Yields the options.

    Raises:
        ValueError: If no option has a valid plan.
    """
    options: list[Option] = []
    least = [inf]
    for option in offer(lambda: least[0]):
        options.append(option)
        least[0] = min(least[0], option.rank[0])
    refused: ValueError | None = None
    for option in sorted(options, key=_rank):
        try:
            return option.plan()
        except ValueError as error:
            refused = refused or error
    assert refused is not None, "there is at least one option"
    raise refused


def ranked(offer: Callable[[Limit], Iterable[Option]]) -> tuple[Candidate, ...]:
    """Returns all candidates with valid plans, the best one first.

    Args:
        offer: Yields the options.

    Raises:
        ValueError: If no option has a valid plan.
    """
    found: dict[Plan, Candidate] = {}
    refused: ValueError | None = None
    for option in sorted(offer(lambda: inf), key=_rank):
        try:
            plan = option.plan()
        except ValueError as error:
            refused = refused or error
        else:
            found[plan] = Candidate(plan=plan, prediction=option.prediction)
    if not found:
        assert refused is not None, "there is at least one option"
        raise refused
    return (*found.values(),)


def doubt(is_split: bool) -> float:
    """Returns the factor on a time that a split has to make good."""
    return 1 + MODEL_ERROR * is_split


def _rank(option: Option) -> tuple[float, ...]:
    return option.rank
