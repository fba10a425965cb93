"""Texts with drafts are those of plain decoding, whatever is drafted and rejected."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import (
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.sample_utils import make_sampler

from drafts.scripted import (
    COUNT,
    PROMPT,
    FixedCost,
    ScriptedDrafter,
    assert_same_text,
    counting,
    decoder,
    plain,
    text_of,
)
from mlx_marlin.lm.drafts import decoder as decoder_module
from mlx_marlin.lm.drafts.decoder import Decoder, Picker, Positions, Token
from mlx_marlin.lm.drafts.draft_length import Choice, Lengths, Losses
from mlx_marlin.lm.drafts.drafters import LookupDrafter, ModelDrafter
from mlx_marlin.lm.drafts.pass_cost import PassCost
from mlx_marlin.lm.drafts.passes import Passes
from support.architectures import ARCHITECTURES
from support.models import tiny_llama
from support.profiles import sampled


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.usefixtures("unfused")
def test_rejections_at_every_position_leave_the_text_as_it_is(name: str) -> None:
    model, text, logprobs = text_of(name)
    length = 4
    drafter = ScriptedDrafter(PROMPT + text, length, lambda nth: nth % (length + 1))
    decoding = decoder(model, drafter)

    found = [each.token for each in decoding.tokens(PROMPT, COUNT)]

    assert_same_text(found, text, logprobs)
    assert {accepted for _, accepted in drafter.lengths} == {0, 1, 2, 3, 4}
    assert decoding.drafted == sum(length for length, _ in drafter.lengths)
    assert decoding.accepted == sum(accepted for _, accepted in drafter.lengths)


@sampled(8)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_lookup_and_a_draft_model_leave_the_text_as_it_is(name: str) -> None:
    model, text, logprobs = text_of(name)
    for drafter in (
        LookupDrafter(),
        ModelDrafter(Passes(model, make_prompt_cache(model))),
    ):
        decoding = decoder(model, drafter)
        found = [each.token for each in decoding.tokens(PROMPT, COUNT)]
        assert_same_text(found, text, logprobs)
        if isinstance(drafter, ModelDrafter):  # it drafts what it verifies
            assert decoding.accepted > 0.8 * decoding.drafted > 0


def test_mlx_lm_leaves_rejected_tokens_in_a_full_window() -> None:
    """And raises nothing, as docs/speculation.md says."""
    full = RotatingKVCache(4)
    full.update_and_fetch(*[mx.zeros((1, 1, 4, 8))] * 2)
    assert trim_prompt_cache([full], 2) == 0
    assert full.offset == 4


class Grammar:
    """A processor with a state, which fails where a text is not the one that it allows.

    It is told of each token once, and cannot be copied.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.seen = [*text], 0

    def __deepcopy__(self, _: object) -> "Grammar":
        raise TypeError("a grammar of another language")

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        length = len(PROMPT) + self.seen
        assert tokens.tolist() == self.text[:length]
        self.seen += 1
        allowed = mx.arange(logits.shape[-1]) == self.text[length]
        return mx.where(allowed, logits, -1e9)


@pytest.mark.parametrize("wrong", [0, 1, 3, 4])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mamba2"])
def test_a_grammar_sees_each_token_of_the_text_once_and_in_order(
    name: str, wrong: int
) -> None:
    model, own, _ = text_of(name)
    text = [*PROMPT, *((token + 1) % 50 for token in own), 0]
    drafter = ScriptedDrafter(text, 4, lambda nth: wrong if nth % 2 else 4)
    grammar = Grammar(text)
    decoding = decoder(model, drafter, processors=[grammar])

    for nth, token in enumerate(decoding.tokens(PROMPT, COUNT), 1):
        assert token.token == text[len(PROMPT) + nth - 1]
        # As with mlx-lm, the next token is being chosen, unless there is none.
        assert grammar.seen == min(nth + 1, COUNT)
    assert decoding.accepted > 10


def test_a_processor_changes_the_logits_that_it_does_without_drafts() -> None:
    model = text_of("llama").model

    def penalty(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, tokens].add(-3.0)

    text, logprobs = plain(model, PROMPT, COUNT, logits_processors=[penalty])
    drafter = ScriptedDrafter(PROMPT + text, 4, lambda nth: nth % 5)

    found = [*decoder(model, drafter, processors=(penalty,)).tokens(PROMPT, COUNT)]

    assert_same_text([each.token for each in found], text, logprobs)
    for each, expected in zip(found, logprobs, strict=True):
        assert mx.allclose(each.logprobs, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("draft", [0, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
@pytest.mark.usefixtures("unfused")
def test_a_sampled_text_is_that_of_plain_decoding_with_the_same_seed(
    name: str, draft: int
) -> None:
    """A sampler is asked once for each token, whatever is drafted."""
    model = text_of(name).model
    sampler = make_sampler(temp=1.5, top_p=0.95)
    mx.random.seed(7)
    text, logprobs = plain(model, PROMPT, COUNT, sampler=sampler)
    assert text != text_of(name).tokens
    drafter = ScriptedDrafter(PROMPT + text, draft, lambda nth: nth % 5)
    mx.random.seed(7)
    decoding = decoder(model, drafter, sampler=sampler)

    found = [each.token for each in decoding.tokens(PROMPT, COUNT)]

    assert_same_text(found, text, logprobs)
    assert (decoding.accepted > 0) == (draft > 0)


def test_the_text_of_processors_is_joined_once_for_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not once for each token of the prompt, which would be quadratic."""
    joined = 0

    def concatenate(*given: Any, **options: Any) -> mx.array:
        nonlocal joined
        joined += 1
        return own(*given, **options)

    model, own = tiny_llama(quantized=False), mx.concatenate
    monkeypatch.setattr(mx, "concatenate", concatenate)
    counts = []
    for length in (5, 300):
        joined = 0
        prompt = [each % 50 for each in range(length)]
        drafter = ScriptedDrafter([], 0, int)
        decoding = decoder(model, drafter, processors=[lambda _, logits: logits])
        [*decoding.tokens(prompt, 4)]
        counts.append(joined)
    assert counts[0] == counts[1]


def test_where_nothing_matches_each_step_is_begun_before_the_last_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_llama(quantized=False)
    events: list[str] = []

    class Watched(Passes):
        def run(self, tokens: mx.array, positions: int = 1) -> mx.array:
            events.append("pass")
            return super().run(tokens, positions)

    class Watching(Positions):
        def read(self) -> Token:
            events.append("read")
            return super().read()

    class Nothing(LookupDrafter):
        def probabilities(self, most: int) -> list[float]:
            return []

    passes = Watched(model, make_prompt_cache(model))
    cost = PassCost({1: 1.0, 16: 2.0}, "test")
    picker = Picker(sampler=None, processors=())
    decoding = Decoder(passes, [Nothing()], cost, picker, generation_stream)
    monkeypatch.setattr(decoder_module, "Positions", Watching)

    assert len([*decoding.tokens([1], 10)]) == 10
    steps = ["pass", *["pass", "read"] * 9, "read"]
    assert events == [*steps, "pass"]  # the last one makes the cache complete


class Learning(ScriptedDrafter):
    """Notes what the loop tells it, and takes 7 seconds for a draft."""

    def __init__(self, text: Sequence[int], events: list[Any], clock: list[float]):
        super().__init__(text, 20, lambda _: 1)
        self.events, self.clock, self.seconds_of_token = events, clock, 0.25

    def draft(self, count: int) -> Sequence[int]:
        self.clock[0] += 7.0
        return super().draft(count)

    def observe(self, length: int, accepted: int) -> None:
        self.events.append(("observed", length, accepted))


def test_what_the_loop_learns_and_decides_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass has a time, without that of its draft and of its beginning."""
    events: list[Any] = []
    clock, lengths = [0.0], iter([0, 0, 0, 2, 2, 0, 0])
    runs = iter([7.0, 2.0, 12.0, 9.0, 8.0, 3.0, 4.0])

    class Timed(Passes):
        are_fed_again = True

        def room(self, rows: int) -> int:
            return rows - 1

        def run(self, tokens: mx.array, positions: int = 1) -> mx.array:
            clock[0] += next(runs)
            return super().run(tokens, positions)

    class Waited(Positions):
        def read(self) -> Token:
            clock[0] += 100.0
            return super().read()

    class Noted(FixedCost):
        def observe(self, rows: int, seconds: float, context: int) -> None:
            events.append(("seconds", rows, pytest.approx(seconds), context))

    class Lost(Losses):
        def observe(self, tokens: int, steps: float) -> None:
            events.append(("steps", tokens, steps))

    class Chosen(Lengths):
        def __init__(
            self, probabilities: list[float], cost: PassCost, **given: Any
        ) -> None:
            begun = given.pop("seconds_of_draft")
            expected = {"waiting": 1, "seconds_of_token": 0.25, "are_fed_again": True}
            assert given == expected
            events.append(("asked", len(probabilities), pytest.approx(begun)))

        def best(self, losses: Losses | None = None) -> Choice:
            assert isinstance(losses, Lost)
            return Choice(length=next(lengths), rate=1.0)

    monkeypatch.setattr(decoder_module, "Lengths", Chosen)
    monkeypatch.setattr(decoder_module, "Losses", Lost)
    monkeypatch.setattr(decoder_module, "Positions", Waited)
    passes = Timed(counting, [], is_seen=False)  # type: ignore[arg-type]
    cost = Noted({1: 1.0, 6: 2.0}, "test")
    picker = Picker(sampler=None, processors=())
    drafter = Learning([*range(3, 20)], events, clock)
    decoding = Decoder(
        passes, [drafter], cost, picker, generation_stream, clock=lambda: clock[0]
    )
    for each in decoding.tokens([3], 8):
        events.append((each.token, each.from_draft, each.rows))

    step = "steps", 1, 1.0
    assert events == [
        # At most as long as the passes whose cost is known; here, room is for one less.
        ("asked", 5, 0.0),
        ("asked", 5, 0.0),
        step,  # the first pass has no time
        (4, False, 1),
        ("asked", 4, 2.0),  # the first pass that was begun ahead
        ("seconds", 1, 112.0, 3),
        step,
        (5, False, 1),
        ("asked", 3, 0.9 * 2 + 0.1 * 12),
        ("seconds", 1, 100.0, 3),
        step,
        ("asked", 3, 3.0),  # again, with the token
        (6, False, 1),
        (7, True, 3),
        ("seconds", 3, 9 + 200 - 3.0, 6),  # both tokens were read
        ("steps", 2, pytest.approx(2 * 1.4 + 2 * 0.25)),  # more is no loss of a draft
        ("observed", 2, 1),
        ("asked", 1, 3.0),
        (8, False, 3),
        ("seconds", 1, 8 + 3 + 100 - 3.0, 7),  # not begun ahead
        step,
        (9, False, 1),
        ("seconds", 1, 104.0, 8),  # before the last token, there is nothing to draft
        step,
        (10, False, 1),
        ("seconds", 1, 100.0, 8),
        step,
        (11, False, 1),
    ]
    assert (decoding.drafted, decoding.accepted) == (2, 1)


class Asked(Lengths):
    """Lengths of which one is always to be tried."""

    def best(self, losses: Losses | None = None) -> Choice:
        return Choice(length=0, rate=1.0)

    def to_try(self, best: int, losses: Losses, *, learns: bool) -> int:
        assert (best, learns) == (0, True)
        return 1


def test_another_length_is_tried_after_each_20_passes_and_drafts_after_plain_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder_module, "Lengths", Asked)
    passes = Passes(counting, [], is_seen=False)  # type: ignore[arg-type]
    drafter = ScriptedDrafter([each % 50 for each in range(200)], 4, lambda _: 4)
    decoding = decoder(nn.Module(), drafter, cache=[], passes=passes)
    found = [*decoding.tokens([0], 70)]
    assert [each.token for each in found] == [each % 50 for each in range(1, 71)]
    tried = [nth for nth, each in enumerate(found) if each.from_draft]
    assert tried == [20, 42, 64]

    monkeypatch.setattr(FixedCost, "weight", lambda _, rows: 1.9)
    passes = Passes(counting, [], is_seen=False)  # type: ignore[arg-type]
    again = [*decoder(nn.Module(), drafter, cache=[], passes=passes).tokens([0], 70)]
    assert not any(each.from_draft for each in again)


class Offering(ScriptedDrafter):
    """Drafts with probabilities that a test gives, by the length of the text."""

    def __init__(self, offers: dict[int, list[float]], seconds: float = 0.0) -> None:
        super().__init__([*range(50)], 16, lambda _: 16)
        self.offers, self.seconds_of_token = offers, seconds
        self.asked: list[int] = []

    def probabilities(self, most: int) -> list[float]:
        return self.offers.get(len(self.known), [])[:most]

    def draft(self, count: int) -> Sequence[int]:
        self.asked.append(len(self.known))
        return super().draft(count)


def test_each_pass_verifies_the_draft_with_the_highest_expected_rate() -> None:
    """Of equal ones the first, whoever drafted before; a drafter's time counts."""
    first = Offering({1: [0.9], 3: [0.5], 5: [0.8] * 3, 9: [0.9], 12: [0.03]})
    second = Offering(
        {1: [0.9], 3: [0.6], 5: [0.9] * 3, 9: [0.9, 0.9], 12: [0.06]}, seconds=0.05
    )
    equal = Offering({1: [0.9]})
    costly = Offering({each: [0.99] * 9 for each in range(20)}, seconds=5.0)
    passes = Passes(counting, [], is_seen=False)  # type: ignore[arg-type]
    decoding = decoder(
        nn.Module(),
        *(costly, first, equal, second),
        cache=[],
        passes=passes,
        seconds={1: 1.0, 16: 1.6},
    )

    found = [each.token for each in decoding.tokens([0], 16)]

    assert found == [*range(1, 17)]
    assert (first.asked, second.asked, costly.asked) == ([1], [3, 5, 9], [])
    assert (first.lengths, equal.asked) == ([(1, 1)], [])
    assert second.lengths == [(1, 1), (3, 3), (2, 2)]


def test_memory_is_cleared_each_256_tokens_of_a_text_without_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = Passes(counting, [], is_seen=False)  # type: ignore[arg-type]
    decoding = decoder(nn.Module(), LookupDrafter(), cache=[], passes=passes)
    cleared: list[int] = []
    tokens = decoding.tokens([0] * 250, -1)
    text = [next(tokens).token]
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(len(text)))
    while len(text) < 270:
        text.append(next(tokens).token)

    assert text == [each % 50 for each in range(1, 271)]
    assert cleared == [6, 262]
