"""What is left of a race: in the file, in the process and on the model."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn
import pytest

import mlx_marlin
from mlx_marlin import cache, state
from mlx_marlin.backends import result_files
from mlx_marlin.lm import optimize as optimizing
from mlx_marlin.lm.drafts.pass_cost import cost_of
from mlx_marlin.lm.race import at_load, forward_race
from mlx_marlin.lm.race.product_race import ROWS
from mlx_marlin.warn_once import forget
from race.conftest import SimulatedMac
from race.test_race import RACED, layer, one_layer, results_of, served
from support.models import Layers, tiny_llama


@pytest.mark.parametrize("how", ["restored", "converted again"])
def test_layers_that_change_have_other_seconds(mac: SimulatedMac, how: str) -> None:
    model = mac.optimize(tiny_llama(), layout="mlx")
    assert cost_of(model).source == "measured"

    if how == "restored":
        mlx_marlin.restore(model)
    else:
        mac.optimize(model, layout="marlin", measure=False)

    assert cost_of(model).source != "measured"


def test_what_was_predicted_before_is_predicted_again(mac: SimulatedMac) -> None:
    model = tiny_llama()
    cost_of(model)
    assert hasattr(model, forward_race.PREDICTED)

    mac.optimize(model, measure=False)

    assert not hasattr(model, forward_race.PREDICTED)


def test_a_model_that_an_error_leaves_unchanged_has_no_seconds(
    mac: SimulatedMac, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("warm-up")

    monkeypatch.setattr(optimizing, "run_once", fails)
    model = tiny_llama()
    with pytest.raises(RuntimeError, match="warm-up"):
        mac.optimize(model, layout="mlx")

    assert cost_of(model).source != "measured"


@pytest.mark.parametrize(
    ("options", "seconds"),
    [({"layout": "mlx"}, 1.0), ({"layout": "marlin"}, 2.0), ({"invariant": True}, 2.0)],
)
def test_stocks_seconds_count_only_where_stock_serves(
    mac: SimulatedMac,
    options: dict[str, Any],
    seconds: float,
    capfd: pytest.CaptureFixture[str],
) -> None:
    mac.ours = lambda layout, m: 9.0
    mac.forward = lambda m, ours: 2.0 if ours else 1.0

    model = mac.optimize(tiny_llama(tied=False), **options)

    assert cost_of(model).seconds(4) == pytest.approx(seconds * 1e-3)
    said = capfd.readouterr().err
    assert ("stock MLX serves them" in said) == (seconds == 1.0)


def test_seconds_of_packed_weights_do_not_count_for_others(mac: SimulatedMac) -> None:
    """Packed weights that lose are given back; then the model is timed as it is."""
    mac.ours = lambda layout, m: 9.0 if layout == "marlin" else 9.6
    milliseconds = {None: 1.0, "marlin": 2.0, "mlx": 0.5}

    def by_layout(model: nn.Module, m: int, count: int) -> list[float]:
        layouts = {getattr(each, "layout", None) for each in model.modules()}
        layout = next((each for each in ("marlin", "mlx") if each in layouts), None)
        mac.forward = lambda m, ours: milliseconds[layout]
        return mac.time_passes(model, m, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_race, "passes", by_layout)
        model = mac.optimize(tiny_llama(tied=False))

    assert cost_of(model).seconds(4) == pytest.approx(0.5e-3)


@contextmanager
def no_results_kept(why: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes it impossible to keep results for a reason, as the message tells it."""
    lock = result_files.folder() / "lock"
    cache.make(lock.parent)
    if why == "Is a directory":
        lock.mkdir()
    elif why == "expected a regular file":
        os.mkfifo(lock)
    elif why == "is locked by another process":
        monkeypatch.setattr(cache, "_waited_in", {lock.parent})
        with cache.locked(lock):
            yield
        return
    else:

        def refused(*_: Any, **__: Any) -> Any:
            raise OSError(why)

        monkeypatch.setattr(result_files, "add", refused)
    yield


@pytest.mark.parametrize(
    "why",
    [
        "a read-only file system",
        "Is a directory",
        "expected a regular file",
        "is locked by another process",
    ],
)
def test_results_that_cannot_be_kept_serve_this_process(
    why: str, mac: SimulatedMac, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget()
    mac.ours = lambda layout, m: 11.0
    with (
        no_results_kept(why, monkeypatch),
        pytest.warns(RuntimeWarning, match=f"not kept: .*{why}") as caught,
    ):
        converted = one_layer(mac)

    assert len(caught) == 1
    assert "measured here" in str(served(converted, [8])[8])
    raced = len(mac.raced)
    state.reset()
    mlx_marlin.optimize(Layers(layer()), layout="mlx")
    assert len(mac.raced) == raced


def test_another_models_race_does_not_end_what_is_left_to_stock(
    mac: SimulatedMac,
) -> None:
    mac.ours, mac.seconds_each = (lambda layout, m: 5.0), at_load.SECONDS
    begun = one_layer(mac)
    mac.seconds_each = 0.0
    mlx_marlin.optimize(Layers(layer(2048)), layout="mlx")

    assert "not measured" in str(served(begun, [8])[8])

    mlx_marlin.optimize(Layers(layer()), layout="mlx")
    assert set(served(begun, [*ROWS, 3]).values()) == {None}


def test_a_link_to_nothing_among_the_results(mac: SimulatedMac) -> None:
    one_layer(mac)
    folder = result_files.folder()
    own = next(folder.glob("*.json"))
    gone = own.with_name(f"{own.stem.rsplit('-', 1)[0]}-gone.json")
    gone.symlink_to(folder / "nothing")

    model = mac.optimize(tiny_llama(), layout="mlx")

    assert cost_of(model).source == "measured"


@pytest.mark.parametrize("packed", [9.0, 11.0])
def test_a_report_and_a_dry_run_have_the_layout_that_won(
    mac: SimulatedMac, packed: float
) -> None:
    mac.ours = lambda layout, m: packed if layout == "marlin" else 12.0
    mac.optimize(Layers(layer()))
    model = Layers(layer())

    reported = mlx_marlin.report(model).layers[0].use
    planned = str(mlx_marlin.optimize(model, dry_run=True))

    converted = mlx_marlin.optimize(model).layers[0]
    assert reported.layout == converted.layout
    assert ("marlin" in planned.split("layers")[0]) == (converted.layout == "marlin")


def test_an_interrupt_leaves_finished_products_as_they_are(mac: SimulatedMac) -> None:
    mac.ours, mac.interrupted_after = (lambda layout, m: 9.0), len(RACED) + 1

    model = mac.optimize(Layers(layer(), layer(2048)), layout="mlx")

    finished, left = (served(each, [2, 3, 8]) for each in model.layers)
    assert set(finished.values()) == {None}
    assert [m for m, reason in left.items() if reason is None] == [2]


def test_stock_serves_where_the_model_was_slower_if_only_packed_weights_raced(
    mac: SimulatedMac, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_load, "is_packed_faster", lambda: True)
    mac.ours = lambda layout, m: 11.0
    mac.forward = lambda m, ours: 1.2 if ours and m == 5 else 1.1

    model = mac.optimize(tiny_llama(tied=False))

    assert {each for _, layouts in mac.raced for each in layouts} == {"marlin"}
    for found in results_of(model, 5):
        assert found is not None
        assert "whole model" in str(found.reason)
