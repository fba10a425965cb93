"""Plans and predictions are those that were recorded, of 600 problems.

After an intended change: python tests/recorded_plans.py
"""

from dataclasses import fields
from typing import Any

import pytest

import recorded_plans
from mlx_marlin.backends import planner
from mlx_marlin.backends.devices import named
from mlx_marlin.planning.problem import Problem
from recorded_plans import described, pair_of, recorded, values_of


@pytest.mark.parametrize("device", recorded_plans.DEVICES)
def test_a_plan_is_the_one_that_was_recorded(device: str) -> None:
    for problem, expected in recorded()[device].items():
        assert described(pair_of(device, problem)) == expected, problem


def test_the_recorded_problems_are_those_that_would_be_recorded_again() -> None:
    plans = recorded()

    assert [*plans] == [*recorded_plans.DEVICES]
    assert sum(map(len, plans.values())) >= 500
    for device, of_device in plans.items():
        assert [*of_device] == [*map(str, recorded_plans.drawn(device))]


class Reader:
    """Lists the attributes of a value that are read."""

    def __init__(self, value: Any) -> None:
        self.value, self.names = value, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self.value, name)


@pytest.mark.parametrize("device", ["Apple M3 Max", "NVIDIA H200"])
def test_every_field_of_a_plan_is_recorded(device: str) -> None:
    plan = planner.choose(Problem(m=8, n=512, k=1024), named(device))
    reader = Reader(plan)
    reader.work, reader.tile = Reader(plan.work), Reader(plan.tile)

    values_of(reader)

    for part in (reader, reader.work, reader.tile):
        of_part = {each.name for each in fields(part.value) if each.init}
        assert of_part - part.names - {"problem", "work", "tile"} == set()
