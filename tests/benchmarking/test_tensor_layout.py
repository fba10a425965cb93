"""What `make mac` reports of tensor operations."""

from collections.abc import Callable
from pathlib import Path

import pytest

import metal_emulator
from benchmarks import tensor_layout
from mlx_marlin.backends import devices
from support.marks import needs_emulator

pytestmark = needs_emulator


@pytest.fixture
def _m5(chip: Callable[..., None]) -> None:
    chip("M5 Max")


@pytest.mark.usefixtures("_m5")
def test_the_layout_of_an_m5_is_named(tmp_path: Path) -> None:
    tensor_layout.main([str(tmp_path / "notes.txt")])

    assert (tmp_path / "notes.txt").read_text().splitlines() == [
        "tensor operations, float16: the layout of M5",
        "tensor operations, bfloat16: the layout of M5",
    ]


@pytest.mark.usefixtures("_m5")
def test_another_layout_is_reported_whole() -> None:
    with metal_emulator.emulated(tensor_layout="g16"):
        lines = [*tensor_layout.lines()]

    assert len(lines) == 2 * (1 + 3 * 32)
    assert "another layout of w" in lines[0]
    # Row and column of each element; generation 16 has columns 0, 1, 8 and 9.
    assert lines[1].startswith("float16, lane 0, w, 32 elements: 0.0 0.1 0.8 0.9 8.0 ")
    assert lines[2].startswith("float16, lane 0, x, 16 elements: ")
    assert max(map(len, lines)) < 300


def test_other_devices_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "current", lambda *_: devices.named("M4 Max"))

    assert [*tensor_layout.lines()] == ["none: Apple M4 Max 40-core GPU"]
