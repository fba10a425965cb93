"""The search for a plan, the same for every back end.

A back end yields options with their predictions. The search returns the valid plan with
the lowest rank.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.prediction import Prediction

if TYPE_CHECKING:
    from mlx_marlin.planning.choice import Candidate

MODEL_ERROR = 0.06
"""Relative error of the cost models against published and measured times. Split tiles
must be predicted to gain more than this."""

BestSoFar = Callable[[], float]
"""Returns the first value of the lowest rank so far. A back end may omit options that
cannot have a lower one."""


class Option(NamedTuple):
    """A candidate whose plan is built on demand, because few of them are needed."""

    rank: tuple[float, ...]
    """Sort key; the lowest is best."""
    prediction: Prediction
    """Predicted times of the plan."""
    plan: Callable[[], Plan]
    """Builds the plan; raises ValueError if it is not valid."""


def best(offer: Callable[[BestSoFar], Iterable[Option]]) -> Plan:
    """Returns the valid plan with the lowest rank.

    Args:
        offer: Yields the options, given `BestSoFar`.

    Raises:
        ValueError: If no option has a valid plan.
    """
    options: list[Option] = []
    least = [inf]
    for option in offer(lambda: least[0]):
        options.append(option)
        least[0] = min(least[0], option.rank[0])
    first_error: ValueError | None = None
    for option in sorted(options, key=_rank):
        try:
            return option.plan()
        except ValueError as error:
            first_error = first_error or error
    assert first_error is not None, "a back end yields at least one option"
    raise first_error


def ranked(offer: Callable[[BestSoFar], Iterable[Option]]) -> "tuple[Candidate, ...]":
    """Returns all candidates with valid plans, ordered by rank.

    Args:
        offer: Yields the options, given `BestSoFar`.

    Raises:
        ValueError: If no option has a valid plan.
    """
    from mlx_marlin.planning.choice import Candidate

    found: dict[Plan, Candidate] = {}
    first_error: ValueError | None = None
    for option in sorted(offer(lambda: inf), key=_rank):
        try:
            plan = option.plan()
        except ValueError as error:
            first_error = first_error or error
        else:
            found[plan] = Candidate(plan=plan, prediction=option.prediction)
    if not found:
        assert first_error is not None, "a back end yields at least one option"
        raise first_error
    return (*found.values(),)


def split_factor(is_split: bool) -> float:
    """Returns the factor on a predicted time: split tiles must gain `MODEL_ERROR`."""
    return 1 + MODEL_ERROR * is_split


def _rank(option: Option) -> tuple[float, ...]:
    return option.rank
