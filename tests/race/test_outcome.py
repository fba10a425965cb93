"""What made-up times say about a layout and about who serves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.lm.race import forward_race, outcome, product_race
from mlx_marlin.planning.measurement import PROMPTS, STOCK, Forwards
from mlx_marlin.planning.problem import Problem
from race.conftest import DEVICES

Pair = tuple[float, float]


@dataclass(kw_only=True)
class Product:
    """A product of some layers."""

    name: str
    layers: tuple[None, ...]

    def problem(self, m: int, layout: str) -> Any:
        return self.name, m, layout


@dataclass(kw_only=True)
class Result:
    """Microseconds of our kernels and of stock MLX; None for what was not timed."""

    us: float | None
    stocks: float | None
    stock: bool = False

    @property
    def medians_us(self) -> dict[str, float]:
        return {} if self.stocks is None else {STOCK: self.stocks}


@dataclass(kw_only=True)
class Known:
    """A race that has ended."""

    known: dict[Any, Result] = field(default_factory=dict)
    raced: tuple[int, ...] = (1, 2, 4, 5, 8, 16, 256, 512)

    def rows(self, product: Any) -> tuple[int, ...]:
        return self.raced

    def problem(self, product: Product, m: int, layout: str) -> Any:
        return product.problem(m, layout)


def prompt_and_answer(one: float, half: float | None, whole: float | None) -> float:
    """Returns the time of 512 tokens read, and of 256 written."""
    if whole is None:
        assert half is not None
        whole = 2 * half
    return whole + 256 * one


def layout_of(times: Mapping[int, Pair]) -> str | None:
    """Returns the layout by the times of all layers, in MLX's layout and packed."""
    few = [times[m] for m in (2, 4, 5, 8) if m in times]
    if 1 not in times or not few:
        return None
    loses = times[1][1] > 1.03 * times[1][0]
    if 256 in times or 512 in times:
        native, packed = (
            prompt_and_answer(times[1][i], *(times.get(m, none)[i] for m in (256, 512)))
            for none in [(None, None)]
            for i in (0, 1)
        )
        loses = loses or packed > native
    gains = sum(packed for _, packed in few) <= 0.95 * sum(native for native, _ in few)
    return "marlin" if gains and not loses else "mlx"


@st.composite
def races(draw: Callable[..., Any]) -> tuple[Known, list[Product], str | None]:
    """Returns a race of two products, and the layout that follows."""
    found, sums, unknown = Known(), {}, set()
    products = [
        Product(name=name, layers=(None,) * draw(st.integers(1, 12))) for name in "ab"
    ]
    near = st.sampled_from([100.0, 95.0, 94.0, 103.0, 104.0, 60.0])
    packed_ones = st.sampled_from([95.0, 90.0, 100.0, 103.0, 104.0])
    for m in found.raced:
        missing = draw(st.sampled_from([None] * 9 + ["packed", "us", "stock"]))
        for each in products:
            stock, native = 100.0, draw(near) if draw(st.booleans()) else None
            packed, count = draw(packed_ones), len(each.layers)
            best = stock if native is None else min(stock, native)
            before = sums.get(m, (0.0, 0.0))
            sums[m] = before[0] + count * best, before[1] + count * packed
            found.known[each.problem(m, "marlin")] = Result(us=packed, stocks=stock)
            found.known[each.problem(m, "mlx")] = Result(us=native, stocks=stock)
            if native is None and draw(st.booleans()):
                del found.known[each.problem(m, "mlx")]
        if missing is not None:
            unknown.add(m)
            last = products[-1].problem(m, "marlin")
            if missing == "packed":
                del found.known[last]
            else:
                gone = {"us": None} if missing == "us" else {"stocks": None}
                found.known[last] = Result(**{"us": 90.0, "stocks": 100.0} | gone)
    known = {m: pair for m, pair in sums.items() if m not in unknown}
    return found, products, layout_of(known)


@given(races())
def test_a_layout_follows_from_the_sums_over_all_layers(
    drawn: tuple[Known, list[Product], str | None],
) -> None:
    race, products, expected = drawn

    assert outcome.faster_layout(race, products) == expected  # type: ignore[arg-type]


FEW = {2: (100.0, 95.0), 4: (100.0, 95.0), 5: (100.0, 95.0), 8: (100.0, 95.0)}


@pytest.mark.parametrize(
    ("times", "layout"),
    [
        ({1: (100.0, 103.0)} | FEW, "marlin"),
        ({1: (100.0, 103.5)} | FEW, "mlx"),
        ({1: (100.0, 100.0)} | FEW | {5: (100.0, 95.1)}, "mlx"),
        ({1: (100.0, 100.0), 8: (100.0, 50.0)}, "marlin"),
        ({1: (100.0, 90.0), 16: (100.0, 50.0)}, None),
        (FEW, None),
        ({1: (100.0, 99.0), 512: (900.0, 1156.0)} | FEW, "marlin"),
        ({1: (100.0, 99.0), 512: (900.0, 1156.5)} | FEW, "mlx"),
        ({1: (100.0, 99.0), 256: (900.0, 1028.0)} | FEW, "marlin"),
        ({1: (100.0, 99.0), 256: (900.0, 1028.5)} | FEW, "mlx"),
        ({1: (100.0, 99.0), 256: (9.0, 9e9), 512: (9.0, 9.0)} | FEW, "marlin"),
    ],
)
def test_limits_of_packed_weights(times: dict[int, Pair], layout: str | None) -> None:
    product = Product(name="a", layers=(None,))
    known = {
        product.problem(m, "marlin"): Result(us=packed, stocks=native)
        for m, (native, packed) in times.items()
    }

    race: Any = Known(known=known, raced=tuple(times))
    assert layout_of(times) == layout
    assert outcome.faster_layout(race, [product]) == layout  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("found", "loses"),
    [
        ({}, False),
        ({1: (1.0, 1.0), 8: (1.0, 1.0)}, False),
        ({1: (1.0, 0.5), 8: (1.0, 1.6)}, True),
        ({1: (1.0, 0.5), 8: (1.0, 1.4), 12: (1.0, 9.0)}, False),
        ({1: (1.0, 0.99), 512: (1.0, 3.56)}, False),
        ({1: (1.0, 0.99), 512: (1.0, 3.57)}, True),
        ({1: (1.0, 0.99), 256: (1.0, 2.28)}, False),
        ({1: (1.0, 0.99), 256: (1.0, 2.29)}, True),
    ],
)
def test_packed_weights_lose_with_few_rows_or_with_a_prompt_and_its_answer(
    found: dict[int, Pair], loses: bool
) -> None:
    assert outcome.loses_packed(found) == loses


OURS = Result(us=10.0, stocks=20.0)
STOCKS = Result(us=40.0, stocks=30.0, stock=True)
LIVE = Result(us=None, stocks=None, stock=True)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ({}, "stock MLX's at all rows"),
        ({2: [STOCKS, LIVE], 4: [LIVE, STOCKS]}, "stock MLX's at all rows"),
        ({2: [OURS, OURS], 10: [OURS]}, "ours at 2 to 10 rows (2.0 times)"),
        # Three layers of the first, one of the second: (3·20 + 30) / (3·10 + 30)
        ({9: [OURS, STOCKS]}, "ours at 9 rows (1.5 times)"),
        ({9: [STOCKS, OURS]}, "ours at 9 rows (1.1 times)"),  # 110 / 100
        ({9: [OURS, LIVE]}, "ours at 9 rows (2.0 times)"),
        (
            {1: [STOCKS, STOCKS], 2: [OURS, OURS], 9: [STOCKS], 10: [OURS, STOCKS]},
            "ours at 2 and 10 rows (1.5 to 2.0 times), stock's elsewhere",
        ),
        (
            {2: [OURS, OURS], 9: [OURS], 10: [STOCKS, LIVE]},
            "ours at 2 to 9 rows (2.0 times), stock's beyond",
        ),
        # The passes of the whole model count where they are known.
        ({3: [OURS, OURS], 9: [OURS]}, "ours at 3 to 9 rows (2.0 to 4.0 times)"),
    ],
)
def test_who_serves_is_told_with_the_gain_over_all_layers(
    rows: dict[int, list[Result]], text: str
) -> None:
    products = [
        Product(name=name, layers=(None,) * count)
        for name, count in (("a", 3), ("b", 1))
    ]
    race: Any = Known(raced=tuple(rows))
    race.known = {
        product.problem(m, "marlin"): result
        for m, results in rows.items()
        for product, result in zip(products, results, strict=False)
    }
    kept = Forwards(key="", layout="marlin", seconds={3: (2.0, 0.5)}, date="")

    assert outcome.served(race, products, kept) == text  # type: ignore[arg-type]


@dataclass(kw_only=True)
class Passes:
    """Forward passes of a clock that a test makes up, and what happens in turn."""

    seconds: float  # Of a pass
    now: float = 0.0
    done: list[Any] = field(default_factory=list)

    def run(self, model: Any, m: int, count: int) -> list[float]:
        self.done.append((m, count - 1))
        self.now += count * self.seconds
        return [self.now] * count

    def convert(self) -> None:
        self.done.append("convert")

    def undo(self) -> None:
        self.done.append("undo")


ONE, THREE = [(1, 1), (256, 1)], [(1, 3), (256, 1)]
AGAIN = ["convert", (1, 1), "undo", (1, 1)]


@pytest.mark.parametrize(
    ("seconds", "in_place", "is_begun", "expected"),
    [
        # A prompt is timed in the first turn only.
        (0.0, True, True, [*ONE, "convert", *ONE, *AGAIN, *AGAIN]),
        (0.0, True, False, ["convert", *ONE, "undo", *ONE, *AGAIN, *AGAIN]),
        (0.0, False, True, [*THREE, "convert", *THREE]),
        (0.0, False, False, ["convert", *THREE, "undo", *THREE]),
        # Time that is over leaves a pair: a pass of each.
        (60.0, True, True, [(1, 1), "convert", (1, 1)]),
        (60.0, False, False, ["convert", (1, 3), "undo", (1, 3)]),
    ],
)
def test_each_pass_of_ours_has_a_counterpart_of_stock_mlxs(
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    in_place: bool,
    is_begun: bool,
    expected: list[Any],
) -> None:
    passes = Passes(seconds=seconds)
    monkeypatch.setattr(forward_race, "passes", passes.run)
    turns = forward_race.Turns(
        model=nn.Module(),
        convert=passes.convert,
        undo=passes.undo,
        say=lambda _: None,
        now=lambda: passes.now,
        deadline=100.0,
        budget=forward_race.Budget(now=lambda: passes.now, end=100.0),
        conversion=1.0,
    )

    if is_begun:
        turns.begin([1, 256], in_place, 30.0)
    turns.take([1, 256], in_place)

    assert passes.done == expected
    assert len(turns.stock) == len(turns.ours)


FEW_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


@pytest.mark.parametrize(
    ("known", "left"),
    [
        ({}, (*FEW_ROWS, 256, 512, 1024, 2048)),
        (dict.fromkeys(FEW_ROWS[1:], (0.9, 2.0)), (1, 256, 512, 1024, 2048)),
        ({256: (0.5, 0.5)}, (*FEW_ROWS, 512, 1024, 2048)),
        ({256: (0.51, 0.1)}, (*FEW_ROWS, 1024, 2048)),
        ({256: (0.1, 0.1), 512: (0.1, 0.51)}, (*FEW_ROWS, 2048)),
    ],
)
def test_a_prompt_follows_one_of_half_as_many_tokens_that_took_half_a_second(
    known: dict[int, Pair], left: tuple[int, ...]
) -> None:
    assert forward_race.missing(known) == left


def test_passes_end_before_a_prompt_that_would_take_over_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = Passes(seconds=0.0)
    monkeypatch.setattr(forward_race, "passes", lambda *_: [9.0, 0.51])
    budget = forward_race.Budget(now=lambda: passes.now, end=1.0)

    rows = (*FEW_ROWS, 256, 512, 1024, 2048)
    found = forward_race.sample(nn.Module(), rows, 1, budget)

    assert found == {m: [0.51] for m in (*FEW_ROWS, 256)}


@pytest.mark.parametrize(
    ("now", "latest", "m", "fits"),
    [
        (9.0, None, 2048, True),
        (10.0, None, 1, False),
        (8.0, (1, 2.0), 16, True),  # up to 16 rows take as long as one
        (8.0, (1, 2.0), 17, False),
        (8.0, (1, 1.0), 32, True),
        (8.0, (32, 2.0), 1, True),
        (8.0, (32, 1.0), 64, True),
        (8.0, (32, 1.0), 65, False),
    ],
)
def test_what_is_begun_fits_by_what_the_latest_took(
    now: float, latest: tuple[int, float] | None, m: int, fits: bool
) -> None:
    clock = [0.0]
    budget = forward_race.Budget(now=lambda: clock[0], end=10.0, needs_one=False)
    if latest is not None:
        with budget.spending(latest[0]):
            clock[0] += latest[1]
    clock[0] = now

    assert budget.fits(m) == fits
    assert replace(budget, needs_one=True).fits(m)


@pytest.mark.parametrize(
    ("n", "k", "most"), [(4096, 4096, 2048), (128_256, 8192, 256), (2**18, 8192, 64)]
)
@pytest.mark.parametrize("decides", [False, True])
def test_rows_are_timed_up_to_a_second_of_the_smallest_gpu(
    n: int, k: int, most: int, decides: bool
) -> None:
    one = Problem(m=1, n=n, k=k, dtype="float16", scale_dtype="float16")
    race = object.__new__(product_race.ProductRace)
    race.decides_layout, race.device = decides, DEVICES["metal"]
    product: Any = SimpleNamespace(layout="mlx", problem=lambda m, layout: one)

    every = (*[1] * decides, 2, 4, 5, 8, 16, 32, 64, 256, 512, 1024, 2048)
    assert race.rows(product) == tuple(m for m in every if m <= most)


def test_rows_between_lie_between_neighbours() -> None:
    neighbours = [*pairwise((*product_race.ROWS, *PROMPTS))]
    for m, pair in product_race.BETWEEN.items():
        assert pair in neighbours
        assert pair[0] < m < pair[1]
