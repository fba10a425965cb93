"""The command runs the body of a kernel, and tells its faults in words."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from metal_emulator.command_line.main import main
from support.marks import needs_emulator

pytestmark = needs_emulator

ADD = "uint i = thread_position_in_grid.x; y[i] = x[i] + T(N) * s;"
ARRAYS = ["--input", "x=4x8:float16:arange", "--output", "y=4x8:float16"]


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    return tmp_path / "kernel.metal"


def emulate(kernel: Path, source: str, *options: str) -> int:
    kernel.write_text(source)
    return main([str(kernel), "--grid", "32", *options])


def test_outputs_are_described(
    kernel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--input", "s=0.5", "--template", "T=float16", "--template", "N=4"]

    status = emulate(kernel, ADD, *ARRAYS, *options)

    assert status == 0
    said = capsys.readouterr().out.strip()
    assert said == "y: float16 4x8, min 2, max 33, mean 17.5, 0 NaN or infinite"


def test_a_file_is_an_input_and_counters_are_json(
    kernel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mx.save(str(tmp_path / "x.npy"), mx.ones((32,)))
    arrays = ["--input", f"x={tmp_path / 'x.npy'}", "--output", "y=32:float32"]

    status = emulate(kernel, "y[thread_position_in_grid.x] = x[0];", *arrays, "--json")

    assert status == 0
    (counters,) = json.loads(capsys.readouterr().out)
    assert counters["kernel"] == "kernel"


def test_an_address_space_that_is_missing_is_told(
    kernel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "half* p = y; p[thread_position_in_grid.x] = 1;"

    assert emulate(kernel, source, *ARRAYS[2:]) == 0
    assert emulate(kernel, source, *ARRAYS[2:], "--check") == 1
    assert "half* p" in capsys.readouterr().out
