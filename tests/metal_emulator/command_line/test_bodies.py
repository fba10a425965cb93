"""`python -m metal_emulator` on a body: its exit status, and what it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_emulator.command_line import command
from metal_emulator.command_line.main import main
from support.marks import needs_emulator
from support.processes import HANG_SECONDS

pytestmark = needs_emulator
OPTIONS = ["--grid", "4", "--output", "y=4:float32"]


@pytest.fixture
def body(tmp_path: Path) -> str:
    file = tmp_path / "body.metal"
    file.write_text("y[thread_position_in_grid.x] = 2;")
    return str(file)


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "metal_emulator", *words],
        timeout=HANG_SECONDS,
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def emulate(folder: Path, source: str, *options: str) -> int:
    """Runs a body that is in the file `kernel.metal` of a folder."""
    (folder / "kernel.metal").write_text(source)
    return main([str(folder / "kernel.metal"), "--grid", "32", *options])


def test_outputs_are_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "uint i = thread_position_in_grid.x; y[i] = x[i] + T(N) * s;"
    arrays = ["--input", "x=4x8:float16:arange", "--output", "y=4x8:float16"]
    options = ["--input", "s=0.5", "--template", "T=float16", "--template", "N=4"]

    assert emulate(tmp_path, source, *arrays, *options) == 0
    said = capsys.readouterr().out.strip()
    assert said == "y: float16 4x8, min 2, max 33, mean 17.5, 0 NaN or infinite"


def test_a_file_is_an_input_and_counters_are_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mx.save(str(tmp_path / "x.npy"), mx.ones((32,)))
    arrays = ["--input", f"x={tmp_path / 'x.npy'}", "--output", "y=32:float32"]

    source = "y[thread_position_in_grid.x] = x[0];"

    assert emulate(tmp_path, source, *arrays, "--json") == 0
    (counters,) = json.loads(capsys.readouterr().out)
    assert counters["kernel"] == "kernel"


def test_an_address_space_that_is_missing_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "half* p = y; p[thread_position_in_grid.x] = 1;"
    output = ["--output", "y=4x8:float16"]

    assert emulate(tmp_path, source, *output) == 0
    assert emulate(tmp_path, source, *output, "--check") == 1
    assert "half* p" in capsys.readouterr().out


def test_a_fault_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "\ny[thread_position_in_grid.x + 9] = 1;"

    assert emulate(tmp_path, source, "--output", "y=4x8:float16") == 1

    said = capsys.readouterr().out
    assert "kernel kernel: write outside buffer 'y' (64 bytes)" in said


def test_a_kernel_runs(body: str) -> None:
    answer = run(body, *OPTIONS)

    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("y: float32 4, min 2, max 2")


def test_a_closed_pipe_is_a_status_and_no_text(body: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    answer = run(body, *OPTIONS, stdout=writer)

    os.close(writer)
    assert (answer.returncode, answer.stderr) == (141, "")


def test_an_interrupt_is_a_status(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)

    assert main([body]) == 130


def test_json_is_printed_alone_or_written_beside_the_text(
    body: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"

    assert main([body, *OPTIONS, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert main([body, *OPTIONS, "--json", str(file)]) == 0
    text = capsys.readouterr().out

    assert json.loads(file.read_text()) == printed
    assert text.startswith("y: float32 4")
    assert [each.name for each in tmp_path.iterdir() if "json" in each.name] == [
        "result.json"
    ]


@pytest.mark.parametrize(
    ("file", "words"),
    [("none/result.json", "the folder none does not exist"), (".", "is a folder")],
)
def test_json_that_cannot_be_written_is_told_first(
    body: str, file: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([body, *OPTIONS, "--json", file]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("nothing", "error: nothing: No such file"),
        ("folder", "folder: a folder, expected a regular file"),
        ("fifo", "fifo: a FIFO, e"),
        ("large", "100000001 bytes, expected at most 100000000"),
    ],
)
def test_only_regular_files_below_the_bound_are_read(
    file: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    os.mkfifo("fifo")
    Path("large").touch()
    os.truncate("large", 100_000_001)

    assert main([file, *OPTIONS]) == 2
    assert words in capsys.readouterr().err
