"""Who serves a model's products after the race, whatever the clocks say."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import strategies as st

import mlx_marlin
from mlx_marlin import guard
from mlx_marlin.backends import (
    devices,
    measured_results,
    result_files,
    selection,
)
from mlx_marlin.backends.metal import backend as metal_backend
from mlx_marlin.lm.race import (
    at_load,
    conditions,
    forward_race,
    model_products,
    product_race,
    stock_kernels,
)
from mlx_marlin.lm.race.forward_race import Budget
from mlx_marlin.lm.race.product_race import AGAIN, BETWEEN, ROWS
from mlx_marlin.planning.measurement import PROMPTS, STOCK
from mlx_marlin.warn_once import forget
from race.conftest import M3_MAX, SimulatedMac
from support.models import Layers, arrays, tiny_llama, types
from support.profiles import drawn

EVERY_ROW = range(1, 70)
RACED = (*ROWS, *PROMPTS)


def layer(n: int = 4096, k: int = 512) -> nn.QuantizedLinear:
    mx.random.seed(n)
    made = nn.QuantizedLinear(k, n, bias=False, group_size=64, bits=4)
    made.scales, made.biases = (
        made[name].astype(mx.float16) for name in ("scales", "biases")
    )
    mx.eval(made.parameters())
    return made


def served(converted: Any, rows: Any = EVERY_ROW) -> dict[int, str | None]:
    """Returns why stock MLX serves a layer with each number of rows."""
    reasons = {}
    for m in rows:
        x = mx.zeros((m, converted["scales"].shape[1] * 64), mx.float16)
        weight = converted["weight"], converted["scales"], converted["biases"]
        reasons[m] = mlx_marlin.why_not(x, *weight)
    return reasons


def one_layer(mac: SimulatedMac, **options: Any) -> Any:
    model = mac.optimize(Layers(layer()), layout="mlx", **options)
    return model.layers[0]


def results_of(model: nn.Module, m: int) -> Iterator[measured_results.Measured | None]:
    """Yields what was measured of each product of a model with a number of rows."""
    for product in at_load.products_of(model, at_load.Target.of(None)):
        problem = product.problem(m, "mlx")
        assert problem is not None
        yield measured_results.find(problem, M3_MAX, selection.backend())


@pytest.mark.parametrize(
    ("us", "is_ours"), [(11.0, False), (10.0, False), (9.71, False), (9.0, True)]
)
def test_who_wins_everywhere_serves_all(
    mac: SimulatedMac, us: float, is_ours: bool
) -> None:
    mac.ours = lambda layout, m: us

    reasons = served(one_layer(mac))

    assert [m for m, _ in mac.raced] == [*RACED]
    assert {reasons[m] is None for m in range(2, 65)} == {is_ours}
    assert is_ours or "measured here" in str(reasons[6])
    machine = measured_results.machine(M3_MAX, "metal")
    stored = result_files.read(result_files.folder(), machine).results.values()
    times = [(each.us, each.medians_us[STOCK]) for each in stored]
    assert times == [(us, 10.0)] * len(RACED)


def test_rows_between_are_raced_only_where_neighbours_disagree(
    mac: SimulatedMac,
) -> None:
    mac.ours = lambda layout, m: 9.0 if 5 <= m < 12 else 11.0

    reasons = served(one_layer(mac))

    assert [m for m, _ in mac.raced] == [*RACED, 12]
    ours = {m for m, reason in reasons.items() if reason is None and 2 <= m <= 64}
    assert ours == {5, 6, 7, 8}  # 9 to 11 lie between a win and a loss


def test_a_later_load_times_nothing(mac: SimulatedMac) -> None:
    mac.ours = lambda layout, m: 9.0 if m > 4 else 11.0
    model = tiny_llama()
    mac.optimize(model)
    assert mac.raced
    assert mac.passes

    mac.optimize(tiny_llama())

    assert not mac.raced
    assert not mac.passes


def test_a_win_that_loses_live_is_off_at_those_rows(
    mac: SimulatedMac, capfd: pytest.CaptureFixture[str]
) -> None:
    mac.ours = lambda layout, m: 9.0
    mac.forward = lambda m, ours: 1.2 if ours and m in (3, 8) else 1.1

    model = mac.optimize(tiny_llama(), layout="mlx")

    assert "slower with our kernels at 3, 8 rows" in capfd.readouterr().err
    for m in range(1, 17):
        for found in results_of(model, m):
            if m in (3, 8):
                assert found is not None
                assert "whole model" in str(found.reason)
            elif m in (2, 4, 5, 16):
                assert found is not None
                assert found.reason is None
    turns = [ours for m, ours in mac.passes if m == 3]
    assert turns == [False, True] + [True, False] * (forward_race.ROUNDS - 1)


def test_rows_that_stock_serves_already_are_not_told_slower(
    mac: SimulatedMac, capfd: pytest.CaptureFixture[str]
) -> None:
    mac.ours = lambda layout, m: 11.0
    mac.forward = lambda m, ours: 1.01 if ours else 1.0

    mac.optimize(tiny_llama(), layout="mlx")

    assert mac.passes
    assert "slower with our kernels" not in capfd.readouterr().err
    for m in range(1, 17):
        for found in results_of(tiny_llama(), m):
            assert found is None or "whole model" not in str(found.reason)


def test_noise_is_timed_again_twice_then_counts_as_equal(mac: SimulatedMac) -> None:
    mac.ours, mac.range = (lambda layout, m: 5.0), 0.11

    reasons = served(one_layer(mac))

    assert [m for m, _ in mac.raced] == [m for m in RACED for _ in range(1 + AGAIN)]
    assert all("counts as equal" in str(reasons[m]) for m in ROWS)
    mac.range = 0.0
    assert None not in served(one_layer(mac), ROWS).values()
    assert not mac.raced


def test_packed_weights_are_never_left_to_stock(mac: SimulatedMac) -> None:
    mac.range = 0.11

    model = mac.optimize(Layers(layer()), layout="marlin")

    x = mx.zeros((8, 512), mx.float16)
    assert mac.raced
    assert mlx_marlin.why_not(x, model.layers[0].packed) is None


def test_forward_passes_have_the_same_cache_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_llama()
    offsets: list[tuple[int, int]] = []
    attention = model.layers[0].self_attn
    whole = type(attention).__call__

    def noted(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if self is attention:
            offsets.append((cache.offset, x.shape[1]))
        y: mx.array = whole(self, x, mask, cache)
        return y

    monkeypatch.setattr(type(attention), "__call__", noted)
    found = forward_race.sample(model, [1, 3], 2, Budget(now=float, end=1.0))

    assert {m: len(times) for m, times in found.items()} == {1: 2, 3: 2}
    before = forward_race.PREFIX
    passes = [((0, before), (before, m)) for m in (1, 3) for _ in range(3)]
    assert offsets == [each for pair in passes for each in pair]


def test_a_pass_is_timed_without_the_tokens_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]

    def run(_: nn.Module, __: Any, rows: int) -> None:
        clock[0] += rows

    monkeypatch.setattr(forward_race, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(forward_race, "_run", run)

    assert forward_race.passes(tiny_llama(), 3, 2) == [3.0, 3.0]


def test_an_interrupt_leaves_a_working_model_with_what_is_known(
    mac: SimulatedMac,
) -> None:
    mac.ours, mac.interrupted_after = (lambda layout, m: 9.0), 3
    first = one_layer(mac)

    reasons = served(first, ROWS)
    assert [m for m in ROWS if reasons[m] is None] == [*ROWS[:3]]
    assert "not measured" in str(served(first, [9])[9])
    mac.interrupted_after = None
    reasons = served(one_layer(mac), ROWS)
    assert [m for m, _ in mac.raced] == [*RACED[3:]]
    assert set(reasons.values()) == {None}


def test_an_interrupt_in_stocks_turn_leaves_a_converted_model(
    mac: SimulatedMac, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(model: nn.Module, m: int, count: int) -> list[float]:
        times = mac.time_passes(model, m, count)
        # Stock MLX's first turn is before the model is converted.
        if (True, False) in pairwise(ours for _, ours in mac.passes):
            raise KeyboardInterrupt
        return times

    monkeypatch.setattr(forward_race, "passes", interrupted)

    model = mac.optimize(tiny_llama(), layout="mlx")

    assert mac.passes
    assert not any(kind is nn.QuantizedLinear for kind in types(model).values())


def test_time_that_is_over_leaves_the_rest_to_stock_until_the_next_load(
    mac: SimulatedMac,
) -> None:
    mac.ours, mac.seconds_each = (lambda layout, m: 9.0), at_load.SECONDS / 2

    reasons = served(one_layer(mac))

    assert [m for m, _ in mac.raced] == [*ROWS[:2]]
    assert [m for m in range(2, 65) if reasons[m] is None] == [2, 4]
    one_layer(mac)
    # At a later load there is less time.
    assert [m for m, _ in mac.raced] == [ROWS[2]]


def test_a_race_that_dies_is_told_once_and_the_model_decides(mac: SimulatedMac) -> None:
    forget()
    mac.error = RuntimeError("the device was lost")

    with pytest.warns(RuntimeWarning, match="the device was lost"):
        converted = one_layer(mac)

    assert not mac.raced
    assert type(converted).__name__ == "MarlinLinear"
    # The model decides, as where nothing was ever measured.
    assert served(converted, ROWS)[8] is None


def test_products_race_though_a_forward_pass_fails(
    mac: SimulatedMac, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget()
    mac.ours = lambda layout, m: 9.0

    def fails(*_: Any) -> Any:
        raise TypeError("it takes pixels")

    monkeypatch.setattr(forward_race, "passes", fails)

    with pytest.warns(RuntimeWarning, match="not compared: TypeError: it takes pixels"):
        mac.optimize(tiny_llama(), layout="mlx")

    assert {m for m, _ in mac.raced} == {*RACED}


def test_a_broken_kernel_does_not_race(
    mac: SimulatedMac, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "why_not", lambda plan: "it is broken")
    monkeypatch.setattr(product_race.guard, "why_not", lambda plan: "it is broken")

    one_layer(mac)

    assert not mac.raced


def test_another_system_races_anew_and_says_why(
    mac: SimulatedMac,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import platform

    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.1", ("", "", ""), ""))
    one_layer(mac)
    assert "measuring again" not in capfd.readouterr().err
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.2", ("", "", ""), ""))

    one_layer(mac)

    said = capfd.readouterr().err
    assert "measuring again: measured with system" in said
    assert "26.1, here" in said
    assert [m for m, _ in mac.raced] == [*RACED]


def test_a_lazy_model_is_not_read(mac: SimulatedMac, tmp_path: Any) -> None:
    path = str(tmp_path / "weights.safetensors")
    model = tiny_llama()
    mx.save_safetensors(path, arrays(model))
    assert not conditions.is_lazy(model)
    model.load_weights(path)
    assert conditions.is_lazy(model)

    mac.optimize(model)

    assert not mac.raced
    assert not mac.passes


NO_RACE: dict[str, Callable[[pytest.MonkeyPatch, Any], object]] = {
    "results are off": lambda patch, _: patch.setenv("MLX_MARLIN_TUNED", "0"),
    "another device": lambda patch, _: patch.setenv("MLX_MARLIN_DEVICE", "M1"),
    "forced": lambda patch, _: patch.setenv("MLX_MARLIN_BACKEND", "metal"),
    "emulated": lambda patch, _: patch.setenv("MLX_MARLIN_BACKEND", "emulator"),
    "virtual": lambda patch, _: patch.setattr(
        devices, "current", lambda *_: replace(M3_MAX, name="Apple Paravirtual device")
    ),
    "on a CPU": lambda patch, _: patch.setattr(
        mx, "default_device", lambda: mx.Device(mx.cpu)
    ),
    "in a pipeline": lambda _, model: setattr(model.model, "pipeline_size", 2),
    "in shards": lambda patch, _: patch.setattr(
        conditions, "is_sharded", lambda layer: True
    ),
}


@pytest.mark.parametrize("why", NO_RACE)
def test_what_is_never_raced(
    mac: SimulatedMac, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    model = tiny_llama()
    NO_RACE[why](monkeypatch, model)

    mac.optimize(model)

    assert not mac.raced
    assert not mac.passes


@pytest.mark.parametrize("options", [{"measure": False}, {"dry_run": True}])
def test_options_that_do_not_race(mac: SimulatedMac, options: dict[str, bool]) -> None:
    mac.optimize(tiny_llama(), **options)

    assert not mac.raced
    assert not mac.passes


def test_invariant_products_are_not_raced_but_the_model_is_timed(
    mac: SimulatedMac,
) -> None:
    mac.optimize(tiny_llama(tied=False), invariant=True)

    assert not mac.raced
    assert {m for m, _ in mac.passes} == {*forward_race.ROWS, *PROMPTS}


@pytest.mark.parametrize(
    ("packed", "at_one", "layout"),
    [(9.4, 10.0, "marlin"), (9.6, 10.0, "mlx"), (9.0, 10.4, "mlx")],
)
def test_weights_are_packed_only_if_that_gains(
    mac: SimulatedMac, packed: float, at_one: float, layout: str
) -> None:
    def ours(which: str, m: int) -> float:
        if which == "mlx":
            return 12.0
        return at_one if m == 1 else packed

    mac.ours = ours
    model = mac.optimize(Layers(layer()))

    assert model.layers[0].layout == layout
    assert all({*layouts} == {"mlx", "marlin"} for _, layouts in mac.raced)
    again = mac.optimize(Layers(layer()))
    assert again.layers[0].layout == layout
    assert not mac.raced


def test_weights_are_packed_once_for_all_rows(
    mac: SimulatedMac, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[int] = []
    own = model_products.pack

    def counted(*given: Any, **options: Any) -> Any:
        packed.append(1)
        return own(*given, **options)

    monkeypatch.setattr(model_products, "pack", counted)
    mac.optimize(Layers(layer(), layer(2048)))

    assert len(mac.raced) > 10
    assert len(packed) == 2


def test_packed_weights_that_lose_live_are_given_back(mac: SimulatedMac) -> None:
    mac.ours = lambda layout, m: 9.0 if layout == "marlin" else 12.0
    mac.forward = lambda m, ours: 2.0 if ours else 1.0

    model = mac.optimize(tiny_llama(tied=False))

    again = mac.optimize(tiny_llama(tied=False))
    for each in (model, again):
        layouts = {m.layout for m in each.modules() if hasattr(m, "layout")}
        assert layouts == {"mlx"}
    assert not mac.raced
    assert not mac.passes


TIMES = st.lists(st.floats(1.0, 20.0), min_size=69, max_size=69)


@drawn(10, ours=TIMES, stock=TIMES)
def test_no_product_is_served_by_a_plan_that_was_slower(
    mac: SimulatedMac, ours: list[float], stock: list[float]
) -> None:
    result_files.clear(result_files.folder())
    index = {m: i for i, m in enumerate((*range(2, 65), 128, *PROMPTS, 384))}
    mac.ours = lambda layout, m: ours[index[m]]
    mac.stock = lambda m: stock[index[m]]

    reasons = served(one_layer(mac), (*range(2, 65), 130, 300, 512, 2000, 2048))

    times = {m: (ours[index[m]], stock[index[m]]) for m, _ in mac.raced}
    assert {*times} >= {*RACED}
    assert {*times} <= {*RACED, *BETWEEN}
    for m, reason in reasons.items():
        if m in times:
            wins = times[m][0] <= 0.97 * times[m][1]
            assert (reason is None) == wins
        else:
            around = (max(r for r in times if r < m), min(r for r in times if r > m))
            assert (reason is None) == all(
                times[r][0] <= 0.97 * times[r][1] for r in around
            )


def test_a_pass_of_a_prompt_decides_on_packed_weights_too(mac: SimulatedMac) -> None:
    mac.ours = lambda which, m: 9.0 if which == "marlin" else 12.0
    mac.forward = lambda m, ours: 500.0 if ours and m >= 256 else 1.0 - 0.1 * ours

    model = mac.optimize(tiny_llama(tied=False))

    assert {m.layout for m in model.modules() if hasattr(m, "layout")} == {"mlx"}


def test_a_last_line_says_who_serves_which_rows(
    mac: SimulatedMac, capfd: pytest.CaptureFixture[str]
) -> None:
    mac.ours = lambda layout, m: 5.0 if m <= 16 else 11.0

    one_layer(mac)

    said = capfd.readouterr().err
    assert (
        "measured: ours at 2 to 16 rows (2.0 times), stock's beyond; 0 s, kept" in said
    )
    one_layer(mac)
    assert "measured" not in capfd.readouterr().err


@pytest.mark.parametrize("rows", [8, "8", (0,), (1.5,)])
def test_wrong_rows_to_warm_up_are_named(rows: Any) -> None:
    with pytest.raises(ValueError, match="expected numbers of rows such as"):
        mlx_marlin.optimize(Layers(layer()), warm_up=rows)


class Compiling:
    """Processes that compile for some seconds of a test's clock, whoever waits."""

    def __init__(self, mac: SimulatedMac, *seconds: float, fails: bool = False) -> None:
        self.mac, self.seconds, self.fails = mac, iter(seconds), fails
        self.ends: dict[str, float] = {}

    def start(self, jobs: Any) -> None:
        for job in jobs:
            if job.mark not in self.ends:
                self.ends[job.mark] = self.mac.now + next(self.seconds, 0.0)

    def has_ended(self, job: Any) -> bool:
        return self.mac.now >= self.ends[job.mark]

    def is_done(self, job: Any) -> bool:
        return self.has_ended(job) and not self.fails

    def is_running(self, job: Any) -> bool:
        return not self.has_ended(job)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        own = stock_kernels.for_race

        def compiling(*given: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(metal_backend, "ahead", lambda version: self)
                return own(*given)

        monkeypatch.setattr(stock_kernels, "for_race", compiling)


@pytest.mark.parametrize(
    ("seconds", "raced", "passes"),
    [
        ([math.inf] * 5, {2, 4, 5}, set()),
        ([0.0] * 5 + [math.inf] * 2, {*RACED}, {*forward_race.ROWS}),
    ],
)
def test_what_waits_for_stocks_kernels_races_at_the_next_load(
    mac: SimulatedMac,
    monkeypatch: pytest.MonkeyPatch,
    seconds: Any,
    raced: Any,
    passes: Any,
) -> None:
    ahead = Compiling(mac, *seconds)
    ahead.use(monkeypatch)
    mac.ours = lambda layout, m: 9.0
    mac.optimize(tiny_llama(), layout="mlx")

    assert {m for m, _ in mac.raced} == raced
    assert {m for m, _ in mac.passes} == passes
    assert mac.now - (0.0 if passes else at_load.SECONDS) < 2
    ahead.ends = dict.fromkeys(ahead.ends, 0.0)
    mac.optimize(tiny_llama(), layout="mlx")
    assert {m for m, _ in mac.raced} == {*RACED} - raced
    assert {m for m, _ in mac.passes} == {*forward_race.ROWS, *PROMPTS} - passes


def test_processes_run_each_prompt_in_both_kinds_of_layers(
    mac: SimulatedMac, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = Compiling(mac)
    monkeypatch.setattr(metal_backend, "ahead", lambda version: ahead)
    monkeypatch.setattr(stock_kernels, "compile_steps", lambda steps: None)
    model = stock_kernels.pickled(tiny_llama())
    kernels = stock_kernels.for_race(
        [], "key", model, {"layout": "mlx", "measure": False}
    )

    for job in kernels.prompts:
        stock_kernels.work(job.argument)
    assert mac.passes == [(m, ours) for ours in (False, True) for m in PROMPTS]
    mac.passes.clear()
    for job in kernels.passes:
        stock_kernels.work(job.argument)
    assert mac.passes == [(1, False), *((m, True) for m in forward_race.ROWS)]


def test_later_loads_keep_to_their_time_and_end(
    mac: SimulatedMac, monkeypatch: pytest.MonkeyPatch
) -> None:
    Compiling(mac, 12, 15, 30, 35, 40).use(monkeypatch)
    mac.ours, mac.seconds_each = (lambda layout, m: 9.0), 0.25
    mac.forward = lambda m, ours: 20.0 + 0.3 * m

    seconds = []
    for _ in range(6):
        began = mac.now
        mac.optimize(tiny_llama(), layout="mlx")
        seconds.append(mac.now - began)
        mac.now += 14  # the first kernels of stock MLX's are done

    first, *later, last = seconds
    assert at_load.SECONDS / 2 < first <= at_load.SECONDS
    assert all(0 < each <= at_load.MORE_SECONDS for each in later)
    assert last == 0.0
    for found in results_of(tiny_llama(), 2048):
        assert found is not None
        assert found.result is not None  # nothing was given up


def test_what_is_not_finished_in_three_loads_is_stocks(
    mac: SimulatedMac,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ahead = Compiling(mac, fails=True)
    ahead.use(monkeypatch)
    # Longer than the time of a later load, but one is finished at each.
    mac.ours, mac.seconds_each = (lambda layout, m: 9.0), 15.0
    raced = []
    for _ in range(5):
        ahead.ends.clear()
        one_layer(mac)
        raced.append([m for m, _ in mac.raced])

    assert raced == [[2], [4], [5], [], []]
    assert not ahead.ends  # no process was started
    said = capfd.readouterr().err
    assert said.count("the rest is measured at the next loads") == 2
    assert said.count("stock MLX serves the rest") == 1
    reasons = served(one_layer(mac), (2, 3, 4, 5, 8, 300))
    assert [m for m, why in reasons.items() if why is None] == [2, 4, 5]
