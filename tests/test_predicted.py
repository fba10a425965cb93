"""What the benchmark of predictions promises of whole models still holds."""

import runpy
from pathlib import Path

import pytest

from mlx_marlin.device import Device

PREDICTED = runpy.run_path(
    str(Path(__file__).parent.parent / "benchmarks" / "predicted.py")
)


@pytest.mark.parametrize("chip", PREDICTED["CHIPS"])
def test_every_bound_is_kept(chip: str) -> None:
    assert PREDICTED["failures"](Device.named(chip)) == []


def test_a_bound_that_is_missed_is_told() -> None:
    # Tensor units leave our kernels behind stock MLX from 16 rows on.
    missed = PREDICTED["failures"](Device.named("Apple M5 Max"))

    assert any("16 rows" in each for each in missed)
