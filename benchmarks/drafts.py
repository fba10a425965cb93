"""The length of drafts on simulated machines, whose clock is a number.

Decoder, cost of a pass and choice of length are the package's; passes and drafts are
scripted: they take the seconds of a table and are accepted with given chances. Of the
tables, products are those of `benchmarks.predicted`, attention is published or modelled
(MLX's own and a kernel for several rows), and what else a pass does is assumed. Nothing
here was measured.

Usage: python -m benchmarks.drafts
"""

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from multiprocessing import Pool
from typing import Any

import mlx.core as mx

from mlx_marlin.lm.drafts.decoder import Decoder, Picker
from mlx_marlin.lm.drafts.drafters import ModelDrafter
from mlx_marlin.lm.drafts.pass_cost import PassCost
from mlx_marlin.lm.drafts.passes import Passes

MOST = 16
"""Rows of the largest pass."""
RACED = (*range(1, 9), 12, 16)
"""Rows whose pass the race times."""
PRODUCTS = {
    ("8B", "M1 Max"): (15.3, 15.3, 19.4, 15.3, 15.4, 20.2, 20.2, 20.2, 36.1),
    ("8B", "M3 Max"): (12.6, 12.6, 12.6, 14.9, 16.0, 14.5, 14.5, 14.5, 26.3),
    ("8B", "M4 Pro"): (18.3, 18.3, 19.5, 25.2, 21.4, 24.6, 24.6, 24.6, 45.3),
    ("8B", "M5 Max"): (8.7, 8.7, 9.0, 10.7, 10.3, 11.4, 11.4, 11.4, 14.2),
    ("27B", "M1 Max"): (41.7, 41.7, 53.6, 41.8, 41.9, 56.0, 56.0, 56.0, 101.9),
    ("27B", "M3 Max"): (35.3, 35.3, 35.4, 41.9, 45.0, 39.7, 39.7, 39.7, 73.4),
    ("27B", "M4 Pro"): (51.8, 51.8, 55.2, 71.6, 58.7, 68.4, 68.4, 68.4, 126.9),
    ("27B", "M5 Max"): (24.0, 24.0, 25.1, 29.8, 27.2, 30.7, 30.7, 30.7, 36.3),
}
"""Milliseconds of a pass's products with 1 to 8 rows, and with 9 to 16."""
ATTENTION = {
    ("8B", "M1 Max"): (0.43, 0.43, 0.43, 0.55, 1.09),
    ("8B", "M3 Max"): (0.38, 0.39, 0.39, 0.39, 0.78),
    ("8B", "M4 Pro"): (0.56, 0.56, 0.56, 0.68, 1.36),
    ("8B", "M5 Max"): (0.25, 0.26, 0.26, 0.29, 0.58),
    ("27B", "M1 Max"): (0.43, 0.43, 0.44, 0.83, 1.66),
    ("27B", "M3 Max"): (0.38, 0.38, 0.39, 0.60, 1.19),
    ("27B", "M4 Pro"): (0.56, 0.56, 0.56, 1.04, 2.07),
    ("27B", "M5 Max"): (0.26, 0.26, 0.26, 0.45, 0.89),
}
"""Milliseconds a layer at 32k tokens with 1, 2, 4, 8, 16 rows, of a kernel for them."""
STOCK = {"M1 Max": 0.31, "M3 Max": 0.235, "M4 Pro": 0.41, "M5 Max": 0.205}
"""Milliseconds that MLX's attention takes longer with each row, up to `GATES`."""
GATES = {"8B": (8, 11.5), "27B": (5, 18.5)}
"""Rows with 32 queries of a head of keys; beyond them, as how many rows it takes."""
LAYERS = {"8B": 36, "27B": 16}
"""Layers whose attention sees the whole text."""
OTHER = {"M1 Max": 5.0, "M3 Max": 4.0, "M4 Pro": 6.0, "M5 Max": 3.0}
"""Assumed milliseconds of the rest of a pass of the 27B model, a twelfth more a row."""
HOST = 0.3e-3
"""Assumed seconds of the host until a pass is begun."""
CONTEXTS = {"1k": 1024, "8k": 8192, "32k": 32768}
CHANCES: dict[str, tuple[float, ...]] = {
    ".3": (0.3,),
    ".5": (0.5,),
    ".6": (0.6,),
    "prose": (0.75, 0.72, 0.61, 0.55),
    "code": (0.90, 0.86, 0.82, 0.78),
    ".95": (0.95,),
}
"""Chance of each token of a draft if those before are accepted; the last goes on."""
LEARNT, WINDOW = 100, 200
"""Tokens after which the best length is found, and over which nothing is lost."""
OF_BEST, OF_PLAIN = 0.95, 0.97
"""Least rate, of the best fixed length's and of plain decoding's."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A chip with a model, by whose kernels attention is computed."""

    model: str
    chip: str
    is_stock: bool = False

    def seconds(self, rows: int, context: int) -> float:
        """Returns the seconds of a pass."""
        of_products = PRODUCTS[self.model, self.chip][min(rows, 9) - 1]
        other = OTHER[self.chip] * (1 + rows / 12) / (1 if self.model == "27B" else 3)
        attention = self._attention(rows) * context / 32768
        return (of_products + other + LAYERS[self.model] * attention) * 1e-3

    def _attention(self, rows: int) -> float:
        known = ATTENTION[self.model, self.chip]
        if self.is_stock:
            gate, beyond = GATES[self.model]
            return max(known[0], STOCK[self.chip] * (rows if rows <= gate else beyond))
        at = rows.bit_length() - 1
        if rows == 2**at:
            return known[at]
        return known[at] + (known[at + 1] - known[at]) * (rows - 2**at) / 2**at


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What happens to a text.

    Attributes:
        machine: Where it is written.
        context: Tokens of its prompt.
        chances: Names of `CHANCES`, each for as many tokens.
        seconds_of_token: Of drafting a token.
        noise: Largest part by which the clock is wrong about a pass.
        throttled: Times that a pass takes from the middle on.
        knows_race: Whether the race has timed passes; else nothing is known.
    """

    machine: Machine
    context: str = "1k"
    chances: tuple[str, ...] = ("prose",)
    seconds_of_token: float = 0.0
    noise: float = 0.0
    throttled: float = 1.0
    knows_race: bool = True
    tokens: int = 500

    def chance(self, token: int, position: int) -> float:
        """Returns the chance of a position of the draft after so many tokens."""
        at = min(token // self.tokens, len(self.chances) - 1)
        by_position = CHANCES[self.chances[at]]
        return by_position[min(position, len(by_position) - 1)]

    def expected(self, token: int, length: int) -> float:
        """Returns the expected tokens of a round with a draft."""
        reached = total = 1.0
        for position in range(length):
            reached *= self.chance(token, position)
            total += reached
        return total

    def seconds(self, token: int, rows: int) -> float:
        """Returns the seconds of a pass."""
        middle = self.tokens * len(self.chances) // 2
        slow = self.throttled if token >= middle else 1.0
        return slow * self.machine.seconds(rows, CONTEXTS[self.context] + token)

    def cost(self) -> PassCost:
        """Returns what is known before the text."""
        if not self.knows_race:
            return PassCost({m: 1 + 0.1 * (m - 1) for m in RACED}, "assumed")
        return PassCost({m: self.machine.seconds(m, 0) for m in RACED}, "measured")


@dataclass(slots=True)
class Clock:
    """The time, and what a clock shows of it."""

    noise: float
    random: random.Random
    now: float = 0.0
    shown: float = 0.0

    def wait(self, until: float) -> None:
        """Goes on until a time, unless it is over."""
        waited = max(until - self.now, 0.0)
        self.now += waited
        self.shown += waited * (1 + self.random.uniform(-self.noise, self.noise))


@dataclass(frozen=True, slots=True)
class Logits:
    """What a pass computes: nothing, at a time."""

    positions: int
    done: float
    clock: Clock

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.positions

    def tolist(self) -> list[int]:
        """Waits for the tokens, which are 0."""
        self.clock.wait(self.done)
        return [0] * self.positions


class ScriptedPasses(Passes):
    """Passes that take a machine's time, one after the other."""

    def __init__(self, case: Case, clock: Clock) -> None:
        super().__init__(None, [], is_seen=False)  # type: ignore[arg-type]
        self._case, self._clock, self._busy = case, clock, 0.0
        self.rounds: list[tuple[int, int]] = []  # tokens before a pass, and its rows

    def feed(self, tokens: Sequence[int], told: Any = None) -> None:
        """Has the prompt at once."""
        self.fed += len(tokens)

    def run(self, tokens: Any, positions: int = 1) -> Any:
        """Begins a pass, which ends after the passes before it."""
        token = self.fed + 1 - CONTEXTS[self._case.context]
        clock = self._clock
        clock.wait(clock.now + HOST)
        self._busy = max(self._busy, clock.now) + self._case.seconds(token, tokens.size)
        self.rounds.append((token, tokens.size))
        self.fed += tokens.size
        return Logits(positions, self._busy, clock)


class ScriptedPicker(Picker):
    """Chooses 0 at each position."""

    def __init__(self) -> None:
        super().__init__(None, ())

    def pick(self, logits: Any) -> Any:
        """Returns the tokens, which are there when the pass is over."""
        return logits, [None] * logits.positions


class ScriptedDrafter(ModelDrafter):
    """Drafts 0 where a token is to be accepted, and learns as with a draft model."""

    def __init__(self, case: Case, clock: Clock) -> None:
        super().__init__(Passes(None, []))  # type: ignore[arg-type]
        self._case, self._clock = case, clock
        self.seconds_of_token = case.seconds_of_token

    def draft(self, count: int) -> Sequence[int]:
        """Takes the time of a draft."""
        case, clock = self._case, self._clock
        clock.wait(clock.now + count * case.seconds_of_token)
        token = len(self._text) - CONTEXTS[case.context]
        return [
            int(clock.random.random() >= case.chance(token, position))
            for position in range(count)
        ]


@dataclass(frozen=True, slots=True)
class Phase:
    """Tokens with the same chances, but for the first `LEARNT`.

    Attributes:
        rate: Times plain decoding's rate.
        best: That of the best fixed length.
        length: Which that is.
    """

    rate: float
    best: float
    length: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How fast a text was written.

    Attributes:
        phases: With each of its chances.
        of_plain: Least rate over `WINDOW` tokens, as times plain decoding's.
    """

    phases: tuple[Phase, ...]
    of_plain: float

    @property
    def of_best(self) -> float:
        """The least rate of a phase, of the best fixed length's."""
        return min(phase.rate / phase.best for phase in self.phases)


def simulated(case: Case, seed: int = 0) -> Outcome:
    """Writes a text on a machine."""
    clock = Clock(case.noise, random.Random(seed))
    passes = ScriptedPasses(case, clock)
    decoder = Decoder(
        passes,
        [ScriptedDrafter(case, clock)],
        case.cost(),
        ScriptedPicker(),
        mx.cpu,
        clock=lambda: clock.shown,
    )
    prompt = [0] * CONTEXTS[case.context]
    count = case.tokens * len(case.chances)
    times = [0.0, *(clock.now for _ in decoder.tokens(prompt, count))]
    plain = [0.0, *accumulate(case.seconds(token, 1) for token in range(count))]
    windows = range(0, count - WINDOW + 1, 10)
    of_plain = min(
        (plain[start + WINDOW] - plain[start]) / (times[start + WINDOW] - times[start])
        for start in windows
    )
    changes = {*range(0, count, case.tokens)}
    if case.throttled != 1.0:
        changes.add(count // 2)
    bounds = [*sorted(changes), count]
    phases = [
        _phase(
            case, [each for each in passes.rounds if start + LEARNT <= each[0] < end]
        )
        for start, end in pairwise(bounds)
    ]
    return Outcome(tuple(phases), of_plain)


def _phase(case: Case, rounds: Sequence[tuple[int, int]]) -> Phase:
    """Compares the expected rate of passes with that of others of a fixed length."""
    fixed = [
        _rate(case, [(token, length + 1) for token, _ in rounds])
        for length in range(MOST)
    ]
    best = max(fixed)
    plain = fixed[0]
    return Phase(_rate(case, rounds) / plain, best / plain, fixed.index(best))


def _rate(case: Case, rounds: Sequence[tuple[int, int]]) -> float:
    """Returns the expected tokens a second of passes with drafts."""
    tokens = seconds = 0.0
    for token, rows in rounds:
        tokens += case.expected(token, rows - 1)
        seconds += case.seconds(token, rows)
        if rows > 1:
            seconds += HOST + (rows - 1) * case.seconds_of_token
    return tokens / seconds


CHANGING = ((".95", ".3", ".95"), (".3", ".95", ".3"), ("prose", "code", ".5"))
"""Chances that change within a text."""
MOST_MISSED = 0.2
"""Part of the texts in which the best length may be missed by more than 5 %."""
LEAST = 0.8
"""Least part of the best rate in any text."""


def cases() -> Iterator[Case]:
    """Yields all cases.

    Each with a drafter that costs nothing and one that costs a tenth of a step; if the
    chances do not change, with a noisy clock and on a machine that is slowed, too.
    """
    machines = [
        Machine(model, chip, is_stock)
        for model, chip in PRODUCTS
        for is_stock in (True, False)
    ]
    chances = [*((each,) for each in CHANCES), *CHANGING]
    for machine, context, each in product(machines, CONTEXTS, chances):
        case = Case(machine=machine, context=context, chances=each)
        yield case
        yield replace(case, seconds_of_token=0.1 * machine.seconds(1, 0))
        if len(each) == 1:
            yield replace(case, noise=0.3)
            yield replace(case, throttled=1.6, tokens=800)


def main() -> int:
    """Prints the cases that miss a bound, and returns 1 if they are many."""
    with Pool() as pool:
        outcomes = [*zip(cases(), pool.imap(simulated, cases(), 8), strict=True)]
    missed = 0
    for case, outcome in outcomes:
        if outcome.of_best < OF_BEST or outcome.of_plain < OF_PLAIN:
            missed += 1
            print(
                f"{outcome.of_best:.3f} of the best, {outcome.of_plain:.3f} of plain:"
            )
            print(f"    {case}\n    {outcome.phases}")
    least = min(outcome.of_plain for _, outcome in outcomes)
    worst = min(outcome.of_best for _, outcome in outcomes)
    print(f"{missed} of {len(outcomes)} texts miss a bound; least rate over {WINDOW}")
    print(f"tokens: {least:.3f} of plain; after {LEARNT}: {worst:.3f} of the best")
    is_kept = least >= OF_PLAIN and worst >= LEAST
    return int(not is_kept or missed > MOST_MISSED * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
