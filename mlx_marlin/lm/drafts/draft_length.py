"""How many tokens to draft: the length with the most expected tokens a second."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_marlin.lm.drafts.pass_cost import PassCost

PRIOR = 0.6
"""Assumed probability that a drafted token is accepted, before any was tried."""
WEIGHT = 2.0
"""How many tried tokens the assumption counts as."""
MEMORY = 0.95
"""Weight of what was tried before, for each further draft: texts change."""
RECENT = 0.75
"""The same of the last tries, by which a change is noticed."""
CHANGE = 0.45
"""Difference of both estimates from which the earlier tries are forgotten."""
PLAIN = 2.0
"""Plain steps by which drafts are judged: with fewer, nothing is drafted."""
BETWEEN = 20
"""Passes from one trial of another length to the next."""
FORGOTTEN = 0.5
"""Passes below which it is tried again, however bad it was."""
DOUBT = 0.2
"""By how much a length may be better than it was in one pass: clocks are noisy."""
SIMILAR = 0.95
"""Part of a draft's tokens from which fewer gain as much, without a trial of it."""
LOST = 4.2
"""Plain steps that drafts may lose: 2 % of 200 tokens."""
FORGIVEN = 0.005
"""Plain steps of these that are forgiven with each token."""
MARGIN = 0.05
"""How much better than plain steps drafts have to be when they have lost as much."""


@dataclass(kw_only=True)
class Acceptance:
    """The probability that a drafted token is accepted if those before it were."""

    # Kind of draft -> accepted and tried tokens. A kind is the length of a match, or
    # the position in a draft model's draft
    kinds: dict[int, tuple[float, float]] = field(default_factory=dict)
    recent: dict[int, float] = field(default_factory=dict)  # position -> probability

    def probability(self, kind: int, assumed: float = PRIOR) -> float:
        """Returns the estimate for a kind of draft."""
        accepted, tried = self.kinds.get(kind, (0.0, 0.0))
        return (accepted + assumed * WEIGHT) / (tried + WEIGHT)

    def observe(self, kind: int, accepted: int, tried: int) -> None:
        """Takes note of tokens that were tried."""
        before = self.kinds.get(kind, (0.0, 0.0))
        self.kinds[kind] = (
            MEMORY * before[0] + accepted,
            MEMORY * before[1] + tried,
        )

    def of_positions(self, count: int) -> list[float]:
        """Returns the estimates for positions, each assumed to be as the one before."""
        found, assumed = [], PRIOR
        for position in range(count):
            assumed = self.probability(position, assumed)
            found.append(assumed)
        return found

    def observe_positions(self, length: int, accepted: int) -> None:
        """Takes note of a draft; of positions that were not reached, tries age."""
        tried = min(length, accepted + 1)
        for position in {*range(tried), *self.kinds}:
            self.observe(position, int(position < accepted), int(position < tried))
        for position in range(tried):
            estimate = self.probability(position)
            before = self.recent.get(position, estimate)
            now = RECENT * before + (1 - RECENT) * (position < accepted)
            self.recent[position] = now
            if abs(now - estimate) > CHANGE:
                self._forget(position, now)
                return

    def _forget(self, position: int, estimate: float) -> None:
        """Leaves the last tries of a position, and none of those after it."""
        tried = 1 / (1 - RECENT)
        for kinds in (self.kinds, self.recent):
            for each in [each for each in kinds if each > position]:
                del kinds[each]
        self.kinds[position] = estimate * tried, tried


class Losses:
    """What drafts have lost against plain steps of late, in plain steps."""

    def __init__(self, most: float = LOST) -> None:
        self.lost, self._most = 0.0, most

    def observe(self, tokens: int, steps: float) -> None:
        """Takes note of the tokens of a pass, and of its seconds as plain steps."""
        lost = self.lost + steps - tokens - FORGIVEN * tokens
        self.lost = min(max(lost, 0.0), 2 * self._most)  # the host may have been away

    @property
    def most_steps(self) -> float:
        """The most that a draft and its pass may take, if nothing is accepted."""
        return 1 + self._most - self.lost

    @property
    def least_gain(self) -> float:
        """The least rate that a draft has to promise, as times plain steps'."""
        return 1 + MARGIN * self.lost / self._most


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A length of a draft.

    Attributes:
        length: Tokens to draft; 0 if no draft pays.
        rate: Expected tokens a second.
    """

    length: int
    rate: float


class Lengths:
    """The expected tokens and seconds of drafts, from none on.

    A draft of d tokens yields 1 + p1 + p1 p2 + ... + p1 ... pd tokens, in the seconds
    of a pass of `waiting` + d rows and of making the draft.
    """

    def __init__(
        self,
        probabilities: Sequence[float],
        cost: PassCost,
        *,
        waiting: int = 1,
        seconds_of_draft: float = 0.0,
        seconds_of_token: float = 0.0,
        are_fed_again: bool = False,
    ) -> None:
        """Computes tokens and seconds of each length that a pass can have.

        `seconds_of_draft`: seconds that a pass with a draft takes longer than one that
        was begun while the host waited for the token before.
        `seconds_of_token`: seconds that one drafted token takes to make.
        `are_fed_again`: whether the rows before a rejected one wait for the next pass,
        which takes longer then; the expected seconds of this count.
        """
        self._cost, self._waiting = cost, waiting
        self._tokens, self._seconds = [1.0], [cost.seconds(waiting)]
        product, again = 1.0, 0.0
        most = max(cost.most_rows - waiting, 0)
        for length, probability in enumerate(probabilities[:most], 1):
            seconds = cost.seconds(waiting + length)
            if are_fed_again:
                longer = max(seconds - cost.seconds(1), 0.0)
                again += product * (1 - probability) * longer
            product *= probability
            self._tokens.append(self._tokens[-1] + product)
            self._seconds.append(
                seconds + seconds_of_draft + length * seconds_of_token + again
            )

    def best(self, losses: Losses | None = None) -> Choice:
        """Returns the length with the most expected tokens a second.

        After losses, those are left out that may lose too much, but for the shortest.
        """
        losses = losses or Losses()
        best = Choice(length=0, rate=losses.least_gain / self._seconds[0])
        most = losses.most_steps * self._cost.seconds(1)
        for length in range(1, len(self._seconds)):
            if length > 1 and self._seconds[length] > most:
                break
            if self._rate(length) > best.rate:
                best = Choice(length=length, rate=self._rate(length))
        return best

    def to_try(self, best: int, losses: Losses, *, learns: bool) -> int:
        """Returns a length of whose cost little is known; 0 if there is none.

        `best`: the length with the highest rate.
        `learns`: whether one drafted token is worth trying where nothing pays.
        """
        most = losses.most_steps * self._cost.seconds(1)
        for length in (best + 1, 2 * best + 1, best - 1):
            is_possible = 0 < length < len(self._seconds)
            is_wanted = (learns and not best) or (
                is_possible and self._may_be_better(length, best)
            )
            if is_possible and is_wanted and self._seconds[length] <= most:
                return length
        return 0

    def _may_be_better(self, length: int, best: int) -> bool:
        passes = self._cost.weight(self._waiting + length)
        gains_little = self._tokens[best] > SIMILAR * self._tokens[length]
        if length > best > 0 and gains_little:
            return False
        if passes < FORGOTTEN:
            return True
        return self._rate(length) * (1 + DOUBT / passes) > self._rate(best)

    def _rate(self, length: int) -> float:
        return self._tokens[length] / self._seconds[length]
