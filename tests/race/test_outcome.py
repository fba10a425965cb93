"""What made-up times say about a layout and about who serves."""

import io
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_marlin.backends import measured_results, planner, registry, result_files
from mlx_marlin.lm.race import (
    at_load,
    forward_race,
    model_products,
    outcome,
    product_race,
    stock_kernels,
)
from mlx_marlin.lm.report.layer_uses import Target, uses_of
from mlx_marlin.measure import clocks
from mlx_marlin.planning.measurement import PROMPTS, STOCK, Forwards
from mlx_marlin.planning.problem import Problem
from race.conftest import DEVICES, SimulatedMac
from support.models import tiny_llama
from tuning.test_model_products import mixtral_of_twelve

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


LIVE = Result(us=None, stocks=None, stock=True)
GAINS, LOSES = Result(us=90.0, stocks=100.0), Result(us=110.0, stocks=100.0)
NATIVE_GAINS = {"marlin": GAINS, "mlx": Result(us=80.0, stocks=100.0)}


@pytest.mark.parametrize(
    ("first", "second", "counts", "layout"),
    [
        ({"marlin": GAINS}, {"marlin": LOSES}, (11, 2), "marlin"),
        ({"marlin": GAINS}, {"marlin": LOSES}, (2, 1), "mlx"),
        ({"marlin": LOSES}, {"marlin": GAINS}, (2, 11), "marlin"),
        # What counts is the faster of stock MLX and of ours in its layout.
        ({"marlin": GAINS}, NATIVE_GAINS, (1, 1), "mlx"),
        ({"marlin": GAINS}, {"marlin": GAINS, "mlx": LOSES}, (1, 1), "marlin"),
        # A product of which a time is not known leaves it open.
        ({"marlin": GAINS}, {}, (1, 1), None),
        ({"marlin": GAINS}, {"marlin": Result(us=None, stocks=9.0)}, (1, 1), None),
        ({"marlin": GAINS}, {"marlin": Result(us=9.0, stocks=None)}, (1, 1), None),
        ({"marlin": GAINS}, {"marlin": GAINS, "mlx": LIVE}, (1, 1), "marlin"),
    ],
)
def test_a_layout_is_that_of_the_least_sum_over_all_layers(
    first: dict[str, Result],
    second: dict[str, Result],
    counts: tuple[int, int],
    layout: str | None,
) -> None:
    products = [
        Product(name=name, layers=(None,) * count)
        for name, count in zip("ab", counts, strict=True)
    ]
    race: Any = Known(raced=(1, 2, 8))
    race.known = {
        product.problem(m, which): result
        for product, results in zip(products, (first, second), strict=True)
        for which, result in results.items()
        for m in race.raced
    }

    assert outcome.faster_layout(race, products) == layout  # type: ignore[arg-type]


OURS = Result(us=10.0, stocks=20.0)
STOCKS = Result(us=40.0, stocks=30.0, stock=True)


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


class Answering(nn.Module):
    """Takes tokens and a cache, and remembers its logits."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.logits = mx.ones((1, tokens.shape[1], 8)) + 1
        return self.logits


@pytest.mark.parametrize(("rows", "is_computed"), [(1, True), (16, True), (256, False)])
def test_logits_are_computed_but_for_prompts(rows: int, is_computed: bool) -> None:
    model, text = Answering(), io.StringIO()
    forward_race._run(model, [SimpleNamespace(state=mx.ones(1))], rows)

    mx.export_to_dot(text, model.logits)
    assert ("label" not in text.getvalue()) == is_computed


def test_a_race_takes_short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        clocks, "wall_time", lambda *_, **options: given.update(options)
    )

    at_load.clock(DEVICES["metal"]).measure({}, ...)  # type: ignore[arg-type]

    assert given == {"seconds": 0.03, "rounds": 3}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Races few rows, because planning takes a while."""
    monkeypatch.setattr(product_race, "ROWS", (2, 8))
    monkeypatch.setattr(product_race, "PROMPTS", ())
    monkeypatch.setattr(forward_race, "ROWS", (1, 8))
    monkeypatch.setattr(forward_race, "PROMPTS", (256,))


@pytest.mark.usefixtures("few")
def test_times_of_another_layout_are_measured_again(mac: SimulatedMac) -> None:
    mac.ours = lambda layout, m: 9.0 if layout == "marlin" else 12.0
    mac.forward = lambda m, ours: 0.5 if ours else 1.0
    mac.seconds_each = at_load.SECONDS  # one measurement, which leaves MLX's layout
    timed = []
    for _ in range(3):
        model = mac.optimize(tiny_llama(tied=False))
        timed.append((model.lm_head.layout, {m for m, ours in mac.passes if ours}))
        mac.seconds_each = 0.0

    assert timed == [("mlx", {1}), ("marlin", {8, 256}), ("marlin", {1})]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("options", "packed", "is_lost"),
    [({}, 9.0, True), ({}, 12.0, False), ({"layout": "marlin"}, 9.0, False)],
)
def test_only_packed_weights_that_a_race_chose_are_given_up(
    mac: SimulatedMac, options: dict[str, str], packed: float, is_lost: bool
) -> None:
    mac.ours = lambda layout, m: packed if layout == "marlin" else 11.0
    mac.forward = lambda m, ours: 2.0 if ours else 1.0

    mac.optimize(tiny_llama(tied=False), **options)

    machine = measured_results.machine(DEVICES["metal"], "metal")
    (kept,) = result_files.read(result_files.folder(), machine).forwards.values()
    assert kept.packed_lost == is_lost
    again = mac.optimize(tiny_llama(tied=False), **options)
    assert again.lm_head.layout == options.get("layout", "mlx")  # packed is not tried


def test_a_process_multiplies_every_product_with_the_rows_of_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mixtral_of_twelve()
    products = {each for each in uses_of(model, Target.of(None)) if each.request}
    done: list[tuple[str, int]] = []
    own = model_products.call

    def call(product: Any, m: int, entry: Any) -> Any:
        def noted(*arrays: mx.array) -> mx.array:
            y: mx.array = own(product, m, entry)(*arrays)
            mx.eval(y)
            assert y.shape[-1] == product.call.n
            done.append((product.title, m))
            return y

        return noted

    monkeypatch.setattr(model_products, "call", call)
    stock_kernels._multiply_all([*products], (8, 16))

    names = {each.title for each in products}
    assert {*done} == {(name, m) for name in names for m in (8, 16)}
    bad = replace(next(iter(products)), request=None)
    done.clear()
    stock_kernels._multiply_all([bad, *products], (8,))
    assert {name for name, _ in done} == names


@pytest.mark.parametrize(
    ("layout", "batch", "m", "is_decoded", "close", "expected"),
    [
        ("mlx", 1, 2, False, 1.1, ["gemv", "gemm"]),
        ("mlx", 1, 2, False, 1.11, ["gemv"]),
        ("marlin", 1, 2, False, 1.1, ["gemv", "gemm"]),
        # With prompts of packed weights, a kernel and decoding take part.
        ("marlin", 1, 512, False, 1.1, ["gemv", "gemm", "decoded"]),
        ("marlin", 1, 512, True, 1.1, ["decoded", "gemv"]),
        ("mlx", 1, 512, True, 1.1, ["decoded"]),
        ("marlin", 2, 512, True, 1.1, ["decoded"]),
        ("marlin", 2, 512, False, 1.1, ["gemv", "gemm"]),
    ],
)
def test_kernels_that_are_close_take_part(
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    batch: int,
    m: int,
    is_decoded: bool,
    close: float,
    expected: list[str],
) -> None:
    def candidate(kernel: str, seconds: float) -> Any:
        prediction = SimpleNamespace(seconds=seconds)
        return SimpleNamespace(
            plan=SimpleNamespace(kernel=kernel), prediction=prediction
        )

    choice = SimpleNamespace(
        candidates=[
            candidate("gemv", 1.0),
            candidate("gemv", 1.01),
            candidate("gemm", close),
            candidate("third", close),
        ]
    )
    decoded = SimpleNamespace(kernel="decoded")
    monkeypatch.setattr(planner, "compare", lambda *_, **__: choice)
    monkeypatch.setattr(
        planner, "choose_dequantize", lambda *_: decoded if is_decoded else None
    )
    monkeypatch.setattr(product_race, "dequantize_plan", lambda _: decoded)
    raced: Any = SimpleNamespace(layout=layout, batch=batch, m=m)

    found: list[Any] = [*product_race.contenders(raced, DEVICES["metal"])]
    assert [each.kernel for each in found] == expected


class Compilers:
    """Processes that compile, of which some have come to an end."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.running: set[str] = set()
        self.done: set[str] = set()

    def start(self, jobs: Any) -> None:
        self.started += jobs

    def is_done(self, job: Any) -> bool:
        return job.name in self.done

    def is_running(self, job: Any) -> bool:
        return job.name in self.running


@pytest.mark.parametrize(
    ("running", "done", "products", "passes"),
    [
        ("", "", {7, 64}, {64}),  # those of up to 7 rows compile alike
        ("few", "8", {7, 8, 64}, set()),
        ("8", "few", {7, 64}, {64}),
        ("prompts", "8", {7, 8, 64}, {8, 64}),
        ("", "8 256", {7, 8, 64, 256}, {8, 64, 256}),
        ("prompts", "8 256", {7, 8, 64, 256}, {8, 64}),
        ("", "256", {7, 64, 256}, {64, 256}),
    ],
)
def test_rows_wait_for_the_processes_that_compile_for_them(
    running: str, done: str, products: set[int], passes: set[int]
) -> None:
    ahead: Any = Compilers()
    ahead.running, ahead.done = {*running.split()}, {*done.split()}
    jobs: Any = {
        name: SimpleNamespace(name=name) for name in ("8", "256", "few", "prompts")
    }
    kernels = stock_kernels.StockKernels(
        ahead=ahead,
        products={(8, 16): jobs["8"], (256, 512): jobs["256"]},
        passes=[jobs["few"]],
        prompts=[jobs["prompts"]],
    )

    rows = (7, 8, 64, 256)
    assert {m for m in rows if kernels.has_products(m)} == products
    assert {m for m in rows if m > 7 and kernels.has_pass(m)} == passes
    assert kernels.running == len(running.split())
    assert f"{4 - kernels.running} of 4" in kernels.told
    alone = stock_kernels.StockKernels(products=kernels.products, passes=kernels.passes)
    assert all(alone.has_products(m) and alone.has_pass(m) for m in rows)


def test_processes_of_another_model_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = Compilers()
    backend = SimpleNamespace(ahead=lambda _: ahead)
    monkeypatch.setattr(registry, "named", lambda _: backend)
    for key in ("one", "other"):
        stock_kernels.for_race([], key, b"", {})

    names = [job.name for job in ahead.started]
    of_products = len(stock_kernels.GROUPS)
    assert len({*names}) == 2 * 4 + of_products
    assert len(names) == 2 * (4 + of_products)
