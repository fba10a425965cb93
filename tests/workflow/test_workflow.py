"""The workflow of CI, walked through on Linux with stand-ins for Apple's tools.

A job's steps run in order in a shell, as on GitHub. Stand-ins take the place of Apple's
compilers and of what installs packages; the emulator stands in for Metal.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import metal_tests
from support.apple_tools import link_tools
from support.marks import needs_emulator
from support.processes import HANG_SECONDS
from support.profiles import sampled

ROOT = Path(__file__).parents[2]
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())[
    "jobs"
]
MATRIX = {"matrix.shard": "1", "matrix.os": "macos-15", "matrix.architecture": ""}
ADDOPTS = f"--rootdir={ROOT} -c {ROOT / 'pyproject.toml'}"
SMALL = "tests/metal/test_block_kernels.py"
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")

STAND_INS = {
    # Targets that exist; what they run has tests of its own.
    "make": 'exec {make} --dry-run --always-make -C {root} "$@"',
    ".venv/bin/python": (
        'case "$*" in *benchmarks.metal_tests*) set -- "$@" $METAL_TESTS;; esac\n'
        'exec {python} "$@"'
    ),
    ".venv/bin/mlx-marlin": (
        'case "$1" in demo) set -- "$@" --tokens 3 --batch 1;; esac\n'
        'exec {python} -m mlx_marlin "$@"'
    ),
}
PLANTED = """
import signal
import pytest
from conftest import _stated
pytestmark = pytest.mark.metal
def test_planted() -> None:
    {body}
"""


@dataclass
class Done:
    """A step that ran."""

    name: str  # Its name
    status: int  # Its exit status
    output: str  # What it printed


Walk = Callable[..., list[Done]]


@pytest.fixture
def walk(tmp_path: Path) -> Walk:
    """Returns what runs the steps of a job until one fails, and those after it."""
    scratch = tmp_path / "checkout"
    scratch.mkdir()
    for entry in ROOT.iterdir():
        if entry.name not in (".venv", ".git"):
            (scratch / entry.name).symlink_to(entry)
    tools = tmp_path / "tools"
    link_tools(tools)
    words = {"make": shutil.which("make"), "python": sys.executable, "root": ROOT}
    for name, text in STAND_INS.items():
        folder = scratch if "/" in name else tools
        program = folder / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text.format(**words)}\n")
        program.chmod(0o755)

    def run(job: str, **variables: str) -> list[Done]:
        environment = {
            **os.environ,
            **{name: filled(str(v)) for name, v in JOBS[job].get("env", {}).items()},
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
            "PYTEST_ADDOPTS": ADDOPTS,
            **variables,
        }
        return [*_steps(job, scratch, environment)]

    return run


def _steps(job: str, scratch: Path, environment: Mapping[str, str]) -> Any:
    is_red = False
    for step in JOBS[job]["steps"]:
        if "run" not in step or (is_red and step.get("if") != "always()"):
            continue
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", filled(step["run"])],
            cwd=scratch,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG_SECONDS,
        )
        is_red |= done.returncode != 0
        yield Done(step["name"], done.returncode, done.stdout)


def filled(text: str) -> str:
    """Returns a text with its expressions replaced, as on a push."""
    text = re.sub(r"\$\{\{ (matrix\.\w+) \}\}", lambda found: MATRIX[found[1]], text)
    text = text.replace("${{ !inputs.runner && 'QUICK=1' || '' }}", "QUICK=1")
    assert "${{" not in text
    return text


def test_every_job_and_command_has_a_limit() -> None:
    for name, job in JOBS.items():
        assert job["timeout-minutes"], name
        limits = [step["timeout-minutes"] for step in job["steps"] if "run" in step]
        assert limits
        assert max(limits) <= job["timeout-minutes"]
    for name in ("census", "metal"):  # whose files are kept when a step fails
        *_, last = JOBS[name]["steps"]
        assert last["uses"].startswith("actions/upload-artifact@")
        assert last["if"] == "always()"
    assert JOBS["census"]["timeout-minutes"] <= 40


def test_matrices_agree_with_each_other() -> None:
    matrices = {
        name: job["strategy"]["matrix"]
        for name, job in JOBS.items()
        if "strategy" in job
    }
    shards = int(JOBS["census"]["env"]["SHARDS"])
    assert matrices["census"]["shard"] == [*range(1, shards + 1)]
    assert json.dumps(matrices["census"]["os"]) in matrices["metal"]["os"]
    assert matrices["census"]["os"] == ["macos-15", "macos-26"]
    assert '"applegpu_g13g", "applegpu_g16s"' in matrices["metal"]["architecture"]
    assert "g17" not in json.dumps(JOBS)  # finite wrong values on a virtual GPU
    pythons = [each["python"] for each in matrices["linux"]["include"]]
    assert pythons == matrices["installed"]["python"]


def test_every_command_exists() -> None:
    commands = [step.get("run", "") for job in JOBS.values() for step in job["steps"]]
    commands += [
        each["command"] for each in JOBS["linux"]["strategy"]["matrix"]["include"]
    ]
    text = "\n".join(commands)
    for module in re.findall(r"-m (\S+)", text):
        assert importlib.util.find_spec(module), module
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert (ROOT / "tests" / "smoke_installed.py").is_file()
    for target in set(re.findall(r"make (\S+)", text)):
        command = ["make", "--dry-run", "--always-make", target]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


@pytest.mark.slow
def test_the_census_passes_with_the_stand_ins(walk: Walk) -> None:
    done = walk("census", SHARDS="200")

    assert [step.status for step in done] == [0, 0], done[-1].output
    assert "4 instances, 0 failed" in done[-1].output


@pytest.mark.slow
@sampled(1, 1)
@pytest.mark.parametrize(
    ("planted", "status", "sentence"),
    [
        ({"error": "marlin"}, 1, "use of undeclared identifier 'planted'"),
        ({"missing": "always"}, 2, "census: Apple's Metal compilers are missing"),
    ],
)
def test_the_census_ends_red_with_a_sentence(
    walk: Walk, planted: dict[str, str], status: int, sentence: str
) -> None:
    _, census = walk("census", SHARDS="200", FAKE_XCRUN=json.dumps(planted))

    assert census.status == status
    assert sentence in census.output


@pytest.mark.slow
@needs_emulator
def test_the_job_for_metal_passes_in_the_emulator(walk: Walk) -> None:
    here = {"BACKEND": "emulator", "MLX_MARLIN_BACKEND": "emulator"}
    done = walk("metal", **here, METAL_TESTS=SMALL)

    assert [step.status for step in done] == [0] * 7, [s for s in done if s.status]
    first, *_, last = [step for step in done if "GPU" in step.name]
    assert first.output == last.output
    assert "simdgroup matrices work" in last.output
    (tests,) = [step for step in done if step.name == "Tests of kernels"]
    assert f"{SMALL}: passed" in tests.output


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has Metal")
def test_without_metal_the_job_says_so(walk: Walk) -> None:
    done = walk("metal", METAL_TESTS=SMALL)

    assert [step.status for step in done] == [0, 1, 1]
    for step in done[1:]:
        assert step.output.startswith("::error::there is no Metal device here")


@pytest.mark.slow
@needs_emulator
@sampled(1, 2)
@pytest.mark.parametrize(
    ("body", "limit", "sentence"),
    [
        ("signal.pause()", "8", "did not end in 8 s"),
        (
            "pytest.skip('nothing here')",
            str(HANG_SECONDS),
            "no test ran, 1 were skipped",
        ),
        ("raise AssertionError", str(HANG_SECONDS), "1 of 1 tests failed"),
    ],
)
def test_a_file_that_proves_nothing_ends_the_job(
    walk: Walk, tmp_path: Path, body: str, limit: str, sentence: str
) -> None:
    planted = tmp_path / "test_planted.py"
    planted.write_text(PLANTED.format(body=body))
    here = {"BACKEND": "emulator", "MLX_MARLIN_BACKEND": "emulator"}

    done = walk("metal", **here, METAL_TESTS=f"--limit {limit} {planted}")

    *_, tests, probe = done
    assert [step.status for step in done] == [0, 0, 1, 0]
    assert f"::error::{planted}: {sentence}" in tests.output.splitlines()
    assert "simdgroup matrices work" in probe.output  # the machine is not to blame


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has Metal")
def test_tests_on_another_back_end_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    planted = tmp_path / "test_planted.py"
    planted.write_text(PLANTED.format(body="assert signal"))
    monkeypatch.setenv("PYTEST_ADDOPTS", ADDOPTS)

    assert metal_tests.main([str(planted)]) == 1

    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith(f"::error::{planted}: the tests ran on MLX_MARLIN_BACKEND=")


def test_the_listed_files_are_those_with_the_marker() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").glob("[!w]*/**/test_*.py")
        if re.search(r"^pytestmark = .*\bmark\.metal\b", path.read_text(), re.MULTILINE)
    }
    assert marked == {*metal_tests.FILES}
