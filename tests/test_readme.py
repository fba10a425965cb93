"""What the README shows is what happens."""

import re
from pathlib import Path

from support import oracles

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_errors_that_are_promised_are_the_tested_ones() -> None:
    promised = re.findall(r"(\d+e-\d+) \((\w+)\)", README)

    assert {dtype: float(bound) for bound, dtype in promised} == oracles.TOLERANCES


def test_every_environment_variable_is_listed() -> None:
    root = Path(__file__).parents[1]
    named = {
        name
        for package in ("mlx_marlin", "metal_emulator")
        for path in (root / package).rglob("*.py")
        for name in re.findall(r"MLX_MARLIN_[A-Z]+", path.read_text(encoding="utf-8"))
    }

    assert named == set(re.findall(r"`(MLX_MARLIN_[A-Z]+)`", README))
    assert len(named) <= 7
