"""The exit status of commands after Ctrl-C, closed pipes and absurd sizes."""

import io
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

import metal_emulator
from cli.conftest import Run
from metal_emulator.command_line import arguments as emulate_arguments
from mlx_marlin.cli import installation
from mlx_marlin.cli.main import COMMANDS, main
from support import quantized_folder
from support.choose import Choose
from support.processes import HANG_SECONDS, run_python

ROOT = Path(__file__).parents[2]
PYPROJECT = ROOT / "pyproject.toml"
KERNEL = ROOT / "examples" / "naive_to_marlin" / "01_naive.metal"
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


@contextmanager
def closed_pipe() -> Iterator[int]:
    """Yields the end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_is_a_status_and_no_text(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module(f"mlx_marlin.cli.{command}"), "run", interrupted)

    assert main([command, *NEEDED.get(command, [])]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_process_that_is_interrupted_prints_no_traceback() -> None:
    program = """
import signal, sys
from mlx_marlin.cli.main import main
from mlx_marlin.cli import plan
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
    with closed_pipe() as writer:
        answer = run(*arguments, stdout=writer)

    assert (answer.returncode, answer.stderr) == (141, "")


def test_an_error_that_nobody_can_read_is_a_status() -> None:
    with closed_pipe() as writer:
        answer = run("plan", "0", "64", "64", stdout=subprocess.PIPE, stderr=writer)

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


def test_a_grid_may_be_as_large_as_metal_counts() -> None:
    assert emulate_arguments.grid("65536,65536") == (65536, 65536, 1)


def test_the_demo_names_the_device_that_is_missing_before_it_loads_a_model(
    backend: Choose, refused: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mx.metal.is_available():
        pytest.skip("MLX has Metal here")
    backend("metal")
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: pytest.fail("loaded"))

    assert "MLX_MARLIN_BACKEND='metal' needs a Metal dev" in refused("demo")


EXTRAS = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ("lm", "convert MODEL none"),
        ("lm", "verify MODEL"),
        ("lm", "report MODEL"),
        ("lm", "demo"),
        ("lm", "lm generate --model MODEL"),
        ("emulator", "bench 4x64x256"),
        ("emulator", "emulate --help"),
        ("emulator", f"emulate {KERNEL} --grid 32 --output y=1:float32"),
    ],
)
def test_a_command_without_its_extra_says_which(extra: str, line: str) -> None:
    """What an extra installs is missing, as in a fresh environment."""
    names = ["mlx_lm", "tqdm"] if extra == "lm" else ["elftools", "ziglang"]
    if "--help" in line:
        names.append("numpy")
    words = line.replace("MODEL", str(quantized_folder.MODEL)).split()
    done = run_python(
        "import importlib.util, sys\n"
        f"for name in {names}: sys.modules[name] = None\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *given: (\n"
        f"    None if name in {names} else find(name, *given))\n"
        "from mlx_marlin.cli.main import main\n"
        f"sys.exit(main({words}))"
    )

    said = done.stderr or done.stdout
    assert done.returncode != 0
    assert said.endswith(f'pip install ".[{extra}]" in a checkout of mlx_marlin\n')


def test_every_module_that_may_be_missing_is_in_its_extra() -> None:
    packages = {"elftools": "pyelftools", "mlx_lm": "mlx-lm"}
    for module, extra in installation.EXTRAS.items():
        name = packages.get(module, module)
        assert any(re.match(rf"{name}\b", each) for each in EXTRAS[extra]), module
    said = installation.why_missing(ImportError("none", name="mlx_lm.models.none"))
    assert said == 'none; pip install ".[lm]" in a checkout of mlx_marlin'
    assert installation.why_missing(ImportError("other")) == "other"
