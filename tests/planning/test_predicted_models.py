"""The bounds of `benchmarks/predicted.py` on whole models still hold."""

from pathlib import Path

import pytest

from benchmarks import predicted
from mlx_marlin.backends.metal import backend as metal
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.problem import problem_of
from support.profiles import sampled

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("chip", predicted.CHIPS)
def test_every_bound_is_kept(chip: str) -> None:
    assert predicted.failures(Device.named(chip)) == []


@pytest.mark.parametrize("chip", ["M1 Max", "M3 Max", "M4 Pro", "M5 Max"])
def test_the_readme_shows_what_is_predicted(chip: str) -> None:
    llama, *_ = predicted.MODELS
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    table = {cells[0]: cells[1:] for line in lines if (cells := _cells(line))}
    found = dict(zip(table["rows"], table[chip], strict=True))

    for rows, gain in found.items():
        stock, ours = predicted.totals(llama, int(rows), Device.named(chip))
        assert float(gain) == pytest.approx(stock / ours, abs=0.006), rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|") if line[:1] == "|"]


def test_a_bound_that_is_missed_is_told() -> None:
    # Each 16 rows decode a weight for its tensor units again.
    missed = predicted.failures(Device.named("Apple M5 Max"))

    assert any(": 33 rows take " in each for each in missed)


@pytest.mark.parametrize("chip", predicted.CHIPS)
def test_what_experts_win_is_that_they_are_read_once(chip: str) -> None:
    device, mixture = Device.named(chip), predicted.MIXTURE
    stock, ours = predicted.totals(mixture, 32, device)

    assert predicted.cached_ratio(mixture, 32, device) < stock / ours
    assert predicted.below({32: stock / ours - 0.01}, device) == []
    assert len(predicted.below({32: stock / ours + 0.01}, device)) == 1


SOME_ROWS = [*range(1, 50), *range(50, 513, 37), 63, 64, 65, 96, 97, 128, 129, 256, 512]


@sampled(0, 2)
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("chip", predicted.CHIPS)
def test_no_product_with_a_native_weight_is_served_slower_than_by_stock(
    chip: str, mode: str
) -> None:
    assert predicted.slower_products(Device.named(chip), SOME_ROWS, mode) == []


def test_without_handing_over_some_products_would_be_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metal, "handover", lambda *_: None)
    slower = predicted.slower_products(Device.named("Apple M5 Max"), [64])

    problem = problem_of(64, 151936, 2048)
    assert f"{problem.explain()} on Apple M5 Max 40-core GPU" in slower
