"""Which settings a search keeps, on synthetic times."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.lm.race.settings import (
    DEFAULTS,
    MARGIN,
    PROMPT_MARGIN,
    TIE,
    Comparison,
    ModelSettings,
    Search,
    basic_settings,
    chosen,
)
from mlx_marlin.planning.measurement import PROMPTS

ROWS = (1, 4, 8)
PROMPT = PROMPTS[0]
NAMES = ("residual", "gate", "norm")
JOINED, TRACED = ModelSettings(join=True), ModelSettings(trace=True)
PACKED = ModelSettings(layout="marlin")
Speed = Callable[[ModelSettings], float]

seconds = st.fixed_dictionaries(
    {m: st.tuples(st.floats(0.5, 2.0), st.just(1.0)) for m in ROWS}
    | {PROMPT: st.tuples(st.floats(0.8, 1.2), st.just(1.0))}
)
excluded = st.sampled_from([None, None, None, "other tokens"])
comparisons = st.lists(
    st.builds(
        Comparison,
        settings=st.sampled_from(basic_settings()),
        seconds=seconds,
        excluded=excluded,
    ),
    unique_by=lambda each: each.settings,
)


def same(settings: ModelSettings, speedup: float) -> Comparison:
    return of(settings, dict.fromkeys(ROWS, speedup))


def of(settings: ModelSettings | None, speeds: dict[int, float]) -> Comparison:
    seconds = {m: (speed, 1.0) for m, speed in speeds.items()}
    return Comparison(settings=settings, seconds=seconds)


def searched(speed: Speed) -> Search:
    found = Search(fusions=NAMES)
    assert [*found.run(lambda each: same(each, speed(each)))]
    return found


@given(comparisons)
def test_nothing_is_kept_that_is_slower_than_stock(measured: list[Comparison]) -> None:
    kept = chosen(measured)

    if kept is not None:
        assert kept.excluded is None
        assert min(kept.speedups.values()) >= 1 - MARGIN
        assert kept.seconds[PROMPT][0] >= 1 - PROMPT_MARGIN
    if kept is None or kept.speedup < 1 + MARGIN:
        assert not any(each.is_faster for each in measured)
        assert kept is None or kept.settings == DEFAULTS


@given(comparisons)
def test_only_simpler_settings_replace_the_fastest(measured: list[Comparison]) -> None:
    kept = chosen(measured)

    for each in measured:
        if each.is_faster and kept is not None and each.speedup > kept.speedup:
            assert each.settings is not None
            assert kept.settings is not None
            assert each.speedup <= kept.speedup * (1 + TIE) * (1 + 1e-9)
            assert kept.settings.complexity <= each.settings.complexity


def test_the_rule_by_examples() -> None:
    faster = 1 + MARGIN + 0.1

    assert chosen([]) is None
    assert chosen([same(DEFAULTS, 1.0), same(JOINED, 1.01)]) == same(DEFAULTS, 1.0)
    assert chosen([same(DEFAULTS, 0.9), same(JOINED, 1.01)]) is None
    assert chosen([same(DEFAULTS, 0.9), same(JOINED, faster)]) == same(JOINED, faster)
    all_ = replace(JOINED, trace=True, layout="marlin")
    tied = [same(all_, 1.203), same(JOINED, 1.2), same(DEFAULTS, 1.1)]
    assert chosen(tied) == tied[1]
    slow_alone = of(JOINED, {1: 0.97, 4: 2.0, 8: 2.0})
    assert not slow_alone.is_harmless
    assert of(JOINED, {1: 0.99, 8: 1.0, PROMPT: 0.96}).is_harmless
    assert not of(JOINED, {1: 2.0, PROMPT: 0.94}).is_harmless
    assert of(JOINED, {1: 1.03, PROMPT: 0.96}).speedup == pytest.approx(1.03)
    other = Comparison(settings=JOINED, excluded="other tokens")
    assert [each.verdict for each in (slow_alone, other, tied[0])] == [
        "slower than stock MLX",
        "not used: other tokens",
        "faster",
    ]


@pytest.mark.parametrize("settings", [*basic_settings()])
def test_every_basic_setting_can_win(settings: ModelSettings) -> None:
    found = searched(lambda each: 1.3 if each == settings else 1.0)

    assert found.result == same(settings, 1.3)
    assert found.skipped == []


def test_fusions_are_tried_alone_on_the_best_and_then_together() -> None:
    gains = {"residual": 1.05, "gate": 0.97, "norm": 1.04}

    def speed(settings: ModelSettings) -> float:
        own = 1.1 if settings.join else 1.0
        for name in settings.fuse:
            own *= gains[name]
        return own * (1.01 if settings.trace else 1.0)

    found = searched(speed)

    tried = [each.fuse for each in found.measured if each.fuse]
    assert tried == [("residual",), ("gate",), ("norm",), ("residual", "norm")]
    assert {(e.layout, e.join) for e in found.measured if e.fuse} == {("mlx", True)}
    best = ModelSettings(join=True, trace=True, fuse=("residual", "norm"))
    assert found.result is not None
    assert found.result.settings == best
    assert found.result.speedup == pytest.approx(speed(best))


def test_fusions_can_make_joining_and_tracing_pay() -> None:
    joined = replace(TRACED, join=True, fuse=("gate",))

    found = searched(lambda each: 1.1 if each == joined else 1.0)

    assert found.result == same(joined, 1.1)


def test_fusions_that_gain_are_tried_without_joining_too() -> None:
    def speed(settings: ModelSettings) -> float:
        own = 0.98 if settings.join else 1.0
        return own * (1.1 if {*settings.fuse} & {"gate", "norm"} else 1.0)

    found = searched(speed)

    assert found.result == same(replace(TRACED, fuse=("gate", "norm")), 1.1)


def test_without_a_gain_the_defaults_stay() -> None:
    assert searched(lambda _: 1.0).result == same(DEFAULTS, 1.0)
    assert searched(lambda _: 0.9).result is None
    assert searched(lambda each: 1.0 if each == DEFAULTS else 0.5).result == same(
        DEFAULTS, 1.0
    )


def test_a_choice_that_was_luck_is_not_kept() -> None:
    calls: list[ModelSettings] = []

    def compare(settings: ModelSettings) -> Comparison:
        calls.append(settings)
        lucky = {PACKED: (1.5, 0.9), JOINED: (1.4, 1.3)}.get(settings, (1.0, 1.0))
        return same(settings, lucky[calls.count(settings) - 1])

    found = Search(fusions=())
    steps = [each.settings for each in found.run(compare)]

    assert found.result == same(JOINED, 1.3)
    assert steps == calls
    assert calls[-2:] == [PACKED, JOINED]
    assert found.measured[PACKED] == same(PACKED, 0.9)


def test_settings_with_other_tokens_are_reported_and_not_used() -> None:
    def compare(settings: ModelSettings) -> Comparison:
        if settings.trace:
            return Comparison(settings=settings, excluded="other tokens")
        return same(settings, 1.0)

    found = Search(fusions=NAMES)

    assert [*found.run(compare)] == [*found.measured.values()]
    assert found.result == same(DEFAULTS, 1.0)
    assert not any(each.fuse for each in found.measured)


@pytest.mark.parametrize("limit", range(1, 14))
def test_without_time_the_choice_is_confirmed_nevertheless(limit: int) -> None:
    calls: list[ModelSettings] = []

    def compare(settings: ModelSettings) -> Comparison:
        calls.append(settings)
        return same(settings, 1.0 + 0.1 * settings.complexity)

    found = Search(fusions=NAMES, is_over=lambda: len(calls) >= limit)
    assert [*found.run(compare)]

    tried = min(limit, found.steps - 1)
    assert len(found.measured) == tried
    assert found.result is not None
    best = max(found.measured.values(), key=lambda each: each.speedup)
    assert found.result.settings == best.settings
    if tried == 1:
        assert best.settings == DEFAULTS
        assert calls == [DEFAULTS]
    else:
        assert calls.count(found.result.settings) == 2
        assert len(calls) == tried + 1
    assert {*basic_settings()} <= {*found.measured, *found.skipped}
    assert (limit < 12) == bool(found.skipped)
