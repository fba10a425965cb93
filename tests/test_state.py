"""What a process remembers, and how it is dropped."""

from collections import deque

import pytest

from mlx_marlin import state


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the test's own state only."""
    monkeypatch.setattr(state, "_resets", [])


def test_reset_clears_caches() -> None:
    calls: list[int] = []

    @state.cache()
    def twice(number: int) -> int:
        calls.append(number)
        return 2 * number

    assert [twice(1), twice(1)] == [2, 2]
    state.reset()
    assert twice(1) == 2
    assert calls == [1, 1]


def test_a_cache_keeps_as_many_results_as_it_is_told() -> None:
    calls: list[int] = []

    @state.cache(maxsize=1)
    def listed(number: int) -> None:
        calls.append(number)

    for number in (1, 2, 1):
        listed(number)
    assert calls == [1, 2, 1]


def test_reset_clears_containers_and_keeps_their_kind() -> None:
    found, last, warned = (
        state.register({"a": 1}),
        state.register(deque([1], maxlen=3)),
        state.register({"b"}),
    )
    state.reset()
    assert (found, last, warned) == ({}, deque(), set())
    assert last.maxlen == 3


def test_what_was_registered_first_is_cleared_first() -> None:
    cleared: list[str] = []

    class Named(list[None]):
        def __init__(self, name: str) -> None:
            self.name = name

        def clear(self) -> None:
            cleared.append(self.name)

    for name in ("lower", "upper"):
        state.register(Named(name))
    state.reset()
    assert cleared == 2 * ["lower", "upper"]


def test_a_decision_from_state_that_registered_later_is_cleared() -> None:
    decisions = state.register({"call": "old"})

    class Verdicts(dict[str, str]):
        """Whose old content another thread still reads when its turn comes."""

        def clear(self) -> None:
            if self:
                decisions["call"] = self["kernel"]
            super().clear()

    state.register(Verdicts(kernel="old"))
    state.reset()
    assert decisions == {}
