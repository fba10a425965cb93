"""How many tokens to draft: the length with the most expected tokens a second."""

from dataclasses import dataclass, field

from mlx_marlin.lm.drafts.pass_cost import PassCost

PRIOR = 0.6
"""Assumed probability that a drafted token is accepted, before any was tried."""
WEIGHT = 4.0
"""How many tried tokens the assumption counts as."""
MEMORY = 0.98
"""Weight of what was tried before, for each further draft: texts change."""
RECOVERY = 0.0005
"""How fast an estimate returns to the assumption for each draft that is not made."""


@dataclass(kw_only=True)
class Acceptance:
    """The probability that a drafted token is accepted if those before it were."""

    # Kind of draft -> accepted and tried tokens. A kind is the length of a match, or
    # the position in a draft model's draft
    kinds: dict[int, tuple[float, float]] = field(default_factory=dict)

    def probability(self, kind: int) -> float:
        """Returns the estimate for a kind of draft."""
        accepted, tried = self.kinds.get(kind, (0.0, 0.0))
        return (accepted + PRIOR * WEIGHT) / (tried + WEIGHT)

    def observe(self, kind: int, accepted: int, tried: int) -> None:
        """Takes note of tokens that were tried."""
        before = self.kinds.get(kind, (0.0, 0.0))
        self.kinds[kind] = (
            MEMORY * before[0] + accepted,
            MEMORY * before[1] + tried,
        )

    def forget(self, kind: int) -> None:
        """Moves an estimate towards the assumption, since nothing was tried."""
        accepted, tried = self.kinds.get(kind, (0.0, 0.0))
        self.kinds[kind] = accepted * (1 - RECOVERY), tried * (1 - RECOVERY)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A length of a draft.

    Attributes:
        length: Tokens to draft; 0 if no draft pays.
        rate: Expected tokens a second.
    """

    length: int
    rate: float


def best_length(
    probabilities: list[float],
    cost: PassCost,
    *,
    waiting: int = 1,
    seconds_of_draft: float = 0.0,
    seconds_of_token: float = 0.0,
    are_fed_again: bool = False,
) -> Choice:
    """Returns the length with the most expected tokens a second.

    A draft of d tokens yields 1 + p1 + p1 p2 + ... + p1 ... pd tokens, in the seconds
    of a pass of `waiting` + d rows and of making the draft.

    `cost`: the seconds of a pass.
    `seconds_of_draft`: seconds that a pass with a draft takes longer than one that was
    begun while the host waited for the token before.
    `seconds_of_token`: seconds that one drafted token takes to make.
    `are_fed_again`: whether the rows before a rejected one wait for the next pass,
    which takes longer then; the expected seconds of this count.
    """
    best = Choice(length=0, rate=1 / cost.seconds(waiting))
    expected = product = 1.0
    again = 0.0
    for length, probability in enumerate(probabilities, 1):
        if waiting + length > cost.most_rows:
            break
        seconds = cost.seconds(waiting + length)
        if are_fed_again:
            longer = max(seconds - cost.seconds(1), 0.0)
            again += product * (1 - probability) * longer
        product *= probability
        expected += product
        seconds += seconds_of_draft + length * seconds_of_token + again
        if expected / seconds > best.rate:
            best = Choice(length=length, rate=expected / seconds)
    return best
