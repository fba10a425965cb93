"""Work that makes no sense is refused, with the argument's name and value."""

import pytest

from mlx_marlin.planning.work.tiles import Tile
from mlx_marlin.planning.work.work import Work


def work_of(base: str, **fields: object) -> Work:
    """Returns valid work of 6 tiles of 8 k tiles, fields replaced."""
    of_strategy: dict[str, dict[str, object]] = {
        "data_parallel": {"threadgroups": 6, "whole": 6},
        "stripe": {"threadgroups": 5, "slices": 2},
        "split_k": {"threadgroups": 12, "slices": 2},
        "stream_k": {"threadgroups": 4, "slices": 8, "groups": 2, "minimum": 2},
        "hybrid": {"threadgroups": 6, "slices": 8, "whole": 4},
        "hytis": {"threadgroups": 6, "whole": 4},
    }
    values = {"strategy": base, "tiles": 6, "k_tiles": 8, **of_strategy[base]}
    return Work(**{**values, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("base", "fields", "words"),
    [
        ("stripe", {"strategy": "diagonal"}, ["strategy='diagonal'", "stream_k"]),
        ("stripe", {"partition": "floor"}, ["partition='floor'", "balanced"]),
        ("stripe", {"tiles": 0}, ["tiles=0", "between 1 and"]),
        ("stripe", {"k_tiles": 0}, ["k_tiles=0", "between 1 and"]),
        ("stripe", {"threadgroups": 0}, ["num_threadgroups=0", "between 1 and"]),
        ("stream_k", {"minimum": 0}, ["minimum=0", "between 1 and"]),
        ("stream_k", {"groups": 0}, ["groups=0", "between 1 and 8"]),
        ("stripe", {"slices": 9}, ["k_parallel=9", "between 1 and 8"]),
        ("hybrid", {"whole": -1}, ["whole=-1", "between 1 and 5"]),
        (
            "data_parallel",
            {"threadgroups": 5},
            ["num_threadgroups=5", "between 6 and 6"],
        ),
        ("split_k", {"threadgroups": 6}, ["num_threadgroups=6", "between 12 and 12"]),
        ("data_parallel", {"whole": 0}, ["whole=0", "between 6 and 6"]),
        ("stripe", {"whole": 1}, ["whole=1", "between 0 and 0"]),
        ("hytis", {"whole": 6}, ["whole=6", "between 1 and 5"]),
        ("data_parallel", {"slices": 2}, ["k_parallel=2", "between 1 and 1"]),
        ("stream_k", {"slices": 4}, ["k_parallel=4", "between 8 and 8"]),
        ("stripe", {"minimum": 2}, ["minimum=2", "between 1 and 1"]),
        ("split_k", {"groups": 2}, ["groups=2", "between 1 and 1"]),
        ("stream_k", {"partition": "ceil"}, ["'balanced'", "partition='ceil'"]),
        ("hybrid", {"threadgroups": 4}, ["num_threadgroups=4", "between 5 and"]),
        ("stream_k", {"groups": 4}, ["groups=4", "6 tiles"]),
        ("stream_k", {"threadgroups": 5}, ["groups=2", "5 threadgroups"]),
        (
            "stream_k",
            {"tiles": 18, "threadgroups": 18, "groups": 9},
            ["groups=9", "between 1 and 8"],
        ),
        (
            "stripe",
            {"tiles": 100_000, "slices": 1, "threadgroups": 70_000},
            ["num_threadgroups=70000 does not divide 100000", "65535"],
        ),
        ("stripe", {"threadgroups": 65536}, ["num_threadgroups=65536", "and 65535"]),
        (
            "stream_k",
            {"tiles": 10_000, "threadgroups": 80_001, "groups": 1},
            ["num_threadgroups=80001", "and 80000"],
        ),
        (
            "stripe",
            {"tiles": 1, "k_tiles": 100_000, "slices": 70_000},
            ["k_parallel=70000 does not divide 100000", "65535"],
        ),
    ],
)
def test_nonsense_is_refused_with_the_values(
    base: str, fields: dict[str, object], words: list[str]
) -> None:
    assert work_of(base).strategy == base

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked
        work_of(base, **fields)

    for word in words:
        assert word in str(caught.value)


def test_many_even_parts_are_fine() -> None:
    assert work_of("stripe", tiles=100_000, threadgroups=100_000, slices=1).longest == 8


@pytest.mark.parametrize("sides", [{"m": 0}, {"m": 8, "n": 12}, {"m": 8, "k": 0}])
def test_a_tile_is_made_of_fragments(sides: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        Tile(**sides)


def test_each_k_tile_may_have_a_threadgroup_and_some_may_be_idle() -> None:
    whole = work_of("stream_k", tiles=10_000, threadgroups=80_000, groups=1, minimum=1)
    idle = work_of("stripe", threadgroups=65535)

    assert (whole.ranges, whole.idle) == (80_000, 0)
    assert idle.idle == 65535 - 12
