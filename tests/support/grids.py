"""Which cases `make test` runs, and which only `make test-all` does (marker `grid`)."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

Test = Callable[..., None]


def representatives(cases: Sequence[Mapping[str, str]], number: int) -> set[int]:
    """Returns the indices of cases that stand for all of them.

    Each is the case with the most, and the rarest, values of parameters that no chosen
    case has; of equal ones, the first that is not near a chosen one.

    Args:
        cases: Each parameter's value by its name.
        number: How many cases to choose, if there are as many.
    """
    frequency = Counter(value for case in cases for value in case.items())
    seen: set[tuple[str, str]] = set()
    chosen: set[int] = set()
    stretches: set[int] = set()

    def gain(i: int) -> tuple[float, bool]:
        new = [value for value in cases[i].items() if value not in seen]
        return sum(1 / frequency[value] for value in new), stretch(i) not in stretches

    def stretch(i: int) -> int:
        return i * number // len(cases)

    for _ in range(min(number, len(cases))):
        best = max((i for i in range(len(cases)) if i not in chosen), key=gain)
        chosen.add(best)
        seen |= cases[best].items()
        stretches.add(stretch(best))
    return chosen


def mark(items: Sequence[pytest.Item]) -> None:
    """Marks all but the representatives of tests with the marker `thinned`."""
    families: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("thinned"):
            family = item.nodeid.removesuffix(item.name) + item.originalname
            families.setdefault(family, []).append(item)
    for cases in families.values():
        thinned = cases[0].get_closest_marker("thinned")
        assert thinned is not None
        values = [
            {name: repr(value) for name, value in case.callspec.params.items()}
            for case in cases
        ]
        kept = representatives(values, *thinned.args)
        for i, case in enumerate(cases):
            if i not in kept:
                case.add_marker("grid")


def drawn(
    few: int, many: int, /, **inputs: SearchStrategy[Any]
) -> Callable[[Test], Test]:
    """Runs a test as Hypothesis's `given` does, with `many` examples in the grid.

    Args:
        few: Examples that `make test` draws.
        many: Examples that `make test-all` draws.
        **inputs: The strategy of each argument; others are fixtures and parameters.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(examples: int, **rest: Any) -> None:
            settings(max_examples=examples)(given(**inputs)(test))(**rest)

        examples = inspect.Parameter("examples", inspect.Parameter.KEYWORD_ONLY)
        rest = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(test).parameters.items()
            if name not in inputs
        ]
        run.__signature__ = inspect.Signature([examples, *rest])  # type: ignore[attr-defined]
        numbers = [few, pytest.param(many, marks=pytest.mark.grid)]
        return pytest.mark.parametrize("examples", numbers)(run)

    return decorate
