"""The exit status of commands after Ctrl-C, closed pipes and absurd sizes."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

import metal_emulator
from metal_emulator.command_line import arguments as emulate_arguments
from mlx_marlin.cli.main import COMMANDS, main
from support.choose import Choose
from support.processes import HANG_SECONDS

PLAN = ["plan", "8", "64", "128"]
NEEDED = {
    "plan": PLAN[1:],
    "convert": ["source", "result"],
    "verify": ["model"],
    "report": ["model"],
    "lm": ["generate"],
    "emulate": ["kernel.metal", "--grid", "32"],
    "render": ["result.json", "-o", "result.html"],
}
"""Arguments that a command cannot do without."""


def run(
    *arguments: str, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process whose output is buffered, as a user's is."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-m", "mlx_marlin", *arguments],
        env={**kept, **(env or {})},
        timeout=HANG_SECONDS,
        **{"stderr": subprocess.PIPE, "text": True, **options},
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_is_a_status_and_no_text(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module(COMMANDS[command][0]), "run", interrupted)

    assert main([command, *NEEDED.get(command, [])]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_process_that_is_interrupted_prints_no_traceback() -> None:
    program = """
import signal, sys
from mlx_marlin.cli.main import main
from mlx_marlin.cli.plan import command as plan
# A test run in the background is started with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
def wait(args):
    print("started", flush=True)
    signal.pause()
plan.run = wait
sys.exit(main(sys.argv[1:]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *PLAN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=HANG_SECONDS)

    assert (process.returncode, said) == (130, "")


def test_an_interrupt_ends_a_kernel_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers: list[Any] = []

    def kernel(**_: object) -> list[mx.array]:
        handlers.append(signal.getsignal(signal.SIGINT))
        return [mx.zeros(4)]

    monkeypatch.setattr(metal_emulator, "metal_kernel", lambda **_: kernel)
    path = tmp_path / "kernel.metal"
    path.write_text("y[0] = 1;")
    before = signal.getsignal(signal.SIGINT)

    assert main(["emulate", str(path), "--grid", "4", "--output", "y=4:float32"]) == 0

    assert handlers == [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["plan", "--help"], PLAN, [*PLAN, "--json"]],
    ids=" ".join,
)
def test_a_closed_pipe_is_a_status_and_no_text(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    answer = run(*arguments, stdout=writer)

    os.close(writer)
    assert (answer.returncode, answer.stderr) == (141, "")


def test_an_error_that_nobody_can_read_is_a_status() -> None:
    reader, writer = os.pipe()
    os.close(reader)

    answer = run("plan", "0", "64", "64", stdout=subprocess.PIPE, stderr=writer)

    os.close(writer)
    assert (answer.returncode, answer.stdout) == (2, "")


@pytest.mark.parametrize("arguments", [PLAN, ["--help"]], ids=" ".join)
def test_standard_output_may_be_closed(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "mlx_marlin", *arguments]

    answer = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG_SECONDS,
    )

    assert answer.returncode == 0
    assert "Error" not in answer.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        answer = run(*PLAN, stdout=full)

    assert answer.returncode == 2
    assert answer.stderr.startswith("mlx-marlin: error: ")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [PLAN, ["tune", "8x64x128", "--dry-run"]], ids=" ".join
)
def test_an_arrow_is_spelled_where_the_terminal_has_none(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)

    assert main(arguments) == 0

    said = output.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "128->64" in said


def test_other_characters_are_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", errors)

    assert main([*PLAN, "--chip", "Ä→M"]) == 2

    said = errors.buffer.getvalue()  # type: ignore[attr-defined]
    assert b"device '?->M' is not one of" in said


def test_the_c_locale_is_enough() -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    answer = run(*PLAN, stdout=subprocess.PIPE, env=plain, encoding="ascii")

    assert (answer.returncode, answer.stderr) == (0, "")
    assert "128->64" in answer.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--grid 1000000000000", "--grid 1000000000000, expected an integer of 32"),
        ("--grid 100000,100000", "--grid 100000,100000 has 10000000000 threads, exp"),
        ("--grid ²", "--grid '²', expected one to three numbers"),
        ("--grid 4 --threadgroup 1e3", "--threadgroup '1e3', expected one to three"),
        ("--grid 4 --input x=none.npy", "--input 'none.npy', expected a .npy file"),
        ("--grid 4 --input x=odd.npy", "--input 'odd.npy', expected a .npy file"),
        ("--grid 4 --input x=short.npy", "--input 'short.npy', expected a .npy file"),
        ("--grid 4 --input x=99999999999999999999", "expected an integer of 64 bits"),
        ("--grid 4 --input x=4:float32 --input x=1", "x is given twice, expected once"),
        (
            "--grid 4 --output y=100000x100000:float32",
            "--output '100000x100000:float32' has 10000000000 elements, expected at",
        ),
        ("--grid 4 --template N=9999999999", "--template N 9999999999, expected an"),
        ("--grid 4 --input x=zip.npy", "--input 'zip.npy', expected a .npy file"),
        ("--grid 4 --input x=npz.npy", "--input 'npz.npy', expected a .npy file"),
        ("--grid 4 --input x=head.npy", "--input 'head.npy', expected a .npy file"),
        ("--grid 4 --header odd.npy", "odd.npy: byte 1 is not UTF-8, expected a text"),
    ],
)
def test_what_emulate_cannot_do_is_one_line(
    options: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kernel.metal").write_text("y[0] = 1;")
    Path("odd.npy").write_bytes(b"x\xff")
    np.save("short.npy", np.zeros(8))
    os.truncate("short.npy", Path("short.npy").stat().st_size - 1)
    Path("zip.npy").write_bytes(b"PK\x03\x04garbage")
    np.savez("npz.npz", np.zeros(8))
    os.replace("npz.npz", "npz.npy")
    Path("head.npy").write_bytes(b"\x93NUMPY\x01\x00\x04\x00{'(\n")

    assert main(["emulate", "kernel.metal", *options.split()]) == 2

    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_grid_may_be_as_large_as_metal_counts() -> None:
    assert emulate_arguments.grid("65536,65536") == (65536, 65536, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--batch 1000000000", "--batch 1000000000, expected 1 to 1024"),
        ("--batch 4 0", "--batch 0, expected 1 to 1024"),
        ("--tokens 1000000000", "--tokens 1000000000, expected 2 to 4096"),
        ("--tokens 1", "--tokens 1, expected 2 to 4096"),
        ("--model /none", "/none: no such folder or file"),
    ],
)
def test_what_the_demo_cannot_do_is_one_line(
    options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *options.split()]) == 2

    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_the_demo_names_the_device_that_is_missing_before_it_loads_a_model(
    backend: Choose, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if mx.metal.is_available():
        pytest.skip("MLX has Metal here")
    backend("metal")
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: pytest.fail("loaded"))

    assert main(["demo"]) == 2

    assert "MLX_MARLIN_BACKEND='metal' needs a Metal dev" in capsys.readouterr().err


def test_minutes_without_an_end_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "8x64x64", "--seconds", "inf"]) == 2

    assert "--seconds inf, expected 1e-09 to 86400" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["render nothing.json -o x.html", "emulate nothing.metal --grid 1"]
)
def test_a_missing_file_is_named_first(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("mlx-marlin: error: nothing.")
    assert "Errno" not in error
