"""Profiles of Hypothesis: `quick` runs a sample of large grids, `full` a larger one.

`make test` uses the first one, `make test-all` the second: `--hypothesis-profile full`.
A third one, `every`, leaves nothing out and takes hours.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

Test = Callable[..., None]
NO_CHECKS = [HealthCheck.too_slow]
"""Checks of Hypothesis that are off: an example may compile a kernel."""
MORE = {"quick": 1.0, "full": 1.5, "every": 10.0}
"""Examples of `drawn` in each profile, as a multiple of those of `quick`."""
MOST = 3
"""Cases of a grid that complete its values in the full profile, as such a multiple."""


def register() -> None:
    """Registers the profiles and loads `quick`.

    A kernel's first call compiles it, and other processes slow a machine down, so no
    example is judged by its time. The parent is what Hypothesis took itself: its own
    "ci" profile, always the same cases, under CI.
    """
    for name, examples in (("quick", 15), ("full", 30), ("every", 100)):
        settings.register_profile(
            name,
            parent=settings.default,
            max_examples=examples,
            deadline=None,
            suppress_health_check=NO_CHECKS,
        )
    settings.load_profile("quick")


def profile() -> str:
    """Returns the name of the profile."""
    # Hypothesis adds to it if a verbosity is asked for.
    return settings.get_current_profile_name().split("-")[0]


def drawn(few: int, /, **inputs: SearchStrategy[Any]) -> Callable[[Test], Test]:
    """Runs a test as `given` does, with `few` examples in the quick profile.

    Others draw `MORE` times as many. Arguments without a strategy are fixtures.
    """
    # A fixture chooses the back end, for instance, which holds for every example.
    examples = settings(
        max_examples=int(few * MORE[profile()]),
        suppress_health_check=[*NO_CHECKS, HealthCheck.function_scoped_fixture],
    )
    return lambda test: examples(given(**inputs)(test))


def sampled(few: int, many: int | None = None) -> Callable[[Test], Test]:
    """Runs `few` of a test's parameter sets in the quick profile.

    The full one runs `many`; without it, half as many again as `few`, and up to `MOST`
    times as many until every value of each parameter occurs.
    """

    def decorate(test: Test) -> Test:
        test.sampled = few, many  # type: ignore[attr-defined]
        return test

    return decorate


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Returns the tests that do not run in the profile."""
    quick = profile() == "quick"
    out = {item for item in items if quick and item.get_closest_marker("slow")}
    families: dict[str, list[pytest.Function]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or item in out:
            continue
        if hasattr(item.function, "sampled"):
            family = item.nodeid.removesuffix(item.name) + item.originalname
            families.setdefault(family, []).append(item)
    for cases in families.values() if profile() != "every" else ():
        values = [
            {name: repr(value) for name, value in case.callspec.params.items()}
            for case in cases
        ]
        few, many = cases[0].function.sampled
        if quick:
            kept = representatives(values, few)
        else:
            number = few + few // 2 if many is None else many
            most = MOST * few if many is None else many
            kept = representatives(values, number, most)
        out |= {case for i, case in enumerate(cases) if i not in kept}
    return out


def representatives(
    cases: Sequence[Mapping[str, str]], number: int, most: int = 0
) -> set[int]:
    """Returns the indices of cases that stand for all of them.

    There are `number`, and up to `most` until they have every value of each parameter.
    Each is the case with the most, and the rarest, values of parameters that no chosen
    case has; of equal ones, the first that is not near a chosen one.
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

    while len(chosen) < min(number, len(cases)) or (
        len(chosen) < most and len(seen) < len(frequency)
    ):
        best = max((i for i in range(len(cases)) if i not in chosen), key=gain)
        chosen.add(best)
        seen |= cases[best].items()
        stretches.add(stretch(best))
    return chosen
