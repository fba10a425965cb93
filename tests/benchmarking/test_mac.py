"""`make mac` on Linux: all stages in the emulator, nothing that looks measured."""

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import mac, stages
from mlx_marlin import cache
from mlx_marlin.backends import devices, measured_results, planner, selection
from mlx_marlin.measure import machine, result_file
from mlx_marlin.measure.result_file import ResultFile
from mlx_marlin.measure.rows import CANDIDATE, OURS, STOCK, Stage
from mlx_marlin.planning.device import PARAVIRTUAL
from mlx_marlin.planning.problem import problem_of
from support.benchmark_rows import FACTS, mac_file
from support.marked_times import unmarked_times
from support.marks import needs_emulator
from support.processes import HANG_SECONDS

ROOT = Path(mac.__file__).parents[1]
STAGES = ["doctor", "tensor", "tests", "tune", "bench", "formats", "staged"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Runs all stages with small shapes as a person named sally would."""
    home = tmp_path_factory.mktemp("sally")
    kept = home / "cache" / "mlx_marlin"
    kept.mkdir(parents=True, mode=0o700)
    compiled = cache.folder("emulator")
    compiled.mkdir(parents=True, exist_ok=True)
    (kept / "emulator").symlink_to(compiled)
    environment = {
        **os.environ,
        "HOME": str(home),
        "USER": "sally",
        "LOGNAME": "sally",
        "XDG_CACHE_HOME": str(home / "cache"),
        "PYTHONPATH": str(ROOT),
        selection.ENVIRONMENT: "emulator",
        measured_results.ENVIRONMENT: "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mac", "--quick", "--folder", str(home)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = home.glob("mlx-marlin-*.json")
    return done.stdout, path


@needs_emulator
@pytest.mark.slow
def test_all_stages_run_in_the_emulator(run: tuple[str, Path]) -> None:
    said, path = run
    result = result_file.read(path)

    assert [(stage.name, stage.status) for stage in result.stages] == [
        (name, "passed") for name in STAGES
    ]
    assert "31 passed, 0 failed, 0 errors, 0 skipped" in stage_of(path, "tests").detail
    assert any(note.startswith("tensor operations, none") for note in result.notes)
    assert path.name.startswith("mlx-marlin-emulator-for-")
    arms = {row.arm for row in result.products}
    assert arms >= {OURS, "gemm_register", "gemm_staged, 3 buffers"}
    assert STOCK not in arms
    keys = [(row.problem, row.arm, row.clock) for row in result.products]
    assert len(keys) == len({*keys})
    candidates = [
        row.plan for row in result.products if row.arm.startswith(f"{CANDIDATE}: ")
    ]
    assert all(plan is not None for plan in candidates)
    assert len({plan.problem for plan in candidates if plan}) == 3
    assert str(path) in said


@needs_emulator
@pytest.mark.slow
def test_nothing_can_be_mistaken_for_a_measurement(run: tuple[str, Path]) -> None:
    said, path = run
    result = result_file.read(path)

    assert unmarked_times(said) == []
    assert "Nothing was measured: there is no GPU here" in said
    assert "attach" not in said
    assert not result.is_measured
    assert {row.timing.source for row in result.products} == {"predicted"}


@needs_emulator
@pytest.mark.slow
def test_the_file_has_no_personal_data(run: tuple[str, Path]) -> None:
    said, path = run
    text = path.read_text()

    assert str(path.parent) in said  # the terminal may show where the file is
    host = platform.node()
    for name in ("sally", str(path.parent), str(ROOT), host, host.split(".")[0]):
        assert not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text), name
    assert "/" not in text


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[str]]:
    """Replaces the commands of stages."""
    commands = {name: [sys.executable, "-c", "pass"] for name in STAGES}
    monkeypatch.setattr(mac, "commands", lambda *_: commands.items())
    return commands


def stage_of(path: Path, name: str) -> Stage:
    return next(each for each in result_file.read(path).stages if each.name == name)


def test_a_stage_that_measures_writes_a_file_of_its_own(tmp_path: Path) -> None:
    for name, command in mac.commands(mac.QUICK, tmp_path):
        written = [word for word in command if word == str(tmp_path / f"{name}.json")]
        assert len(written) == (name in mac.MEASURING)
        assert ("--json" in command) == (name in mac.MEASURING)


@pytest.mark.parametrize("name", mac.MEASURING)
def test_the_rows_are_those_of_the_stages_file(name: str, tmp_path: Path) -> None:
    found = mac_file()
    result_file.write(tmp_path / f"{name}.json", found)
    result = replace(found, products=[], notes=[])

    stage = mac._add_findings(Stage(name=name, status="passed"), tmp_path, result)

    assert stage.status == "passed"
    assert [row.arm for row in result.products] == [row.arm for row in found.products]
    assert result.notes == found.notes


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_stage_that_fails_does_not_lose_the_others(
    given: dict[str, list[str]], tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = replace(mac_file(), notes=["drifted"])
    result_file.write(tmp_path / "found.json", found)
    files = str(tmp_path / "found.json"), str(scratch / "bench.json")
    given["doctor"] = program("import sys; sys.exit('error: no /Users/me/device')")
    given["tune"] = ["/no/such/program"]
    given["bench"] = program(f"import os, shutil; shutil.copy(*{files}); os.abort()")

    path = mac.run(mac.QUICK, scratch, tmp_path)

    result = result_file.read(path)
    assert [stage.name for stage in result.stages] == STAGES
    doctor, tune = stage_of(path, "doctor"), stage_of(path, "tune")
    assert doctor.status == "failed"
    assert doctor.detail == "exit status 1: error: no PATH"
    assert tune.status == "failed"
    assert tune.detail.startswith("cannot start: ")
    assert stage_of(path, "tests").status == "failed"  # it wrote no report
    assert "nothing could be read" in stage_of(path, "tests").detail
    # What the stage had found before it crashed is kept.
    bench = stage_of(path, "bench")
    assert bench.status == "failed"
    assert bench.detail.startswith("exit status -6")
    assert len(result.products) == len(found.products)
    assert "drifted" in result.notes


def test_a_paravirtual_device_is_not_timed(
    given: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    virtual = replace(FACTS, chip=PARAVIRTUAL)
    monkeypatch.setattr(machine, "facts", lambda _: virtual)

    path = mac.run(mac.QUICK, tmp_path, tmp_path)

    result = result_file.read(path)
    assert path.name.startswith("mlx-marlin-apple-paravirtual-device-")
    assert [stage.name for stage in result.stages] == ["doctor", "tensor", "tests"]
    assert "paravirtual device: nothing was timed" in result.notes


def test_a_stage_that_takes_too_long_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(HANG_SECONDS)
    child = (
        "import signal, socket; "
        f"connection = socket.create_connection({server.getsockname()}); signal.pause()"
    )
    text = (
        "import signal, subprocess, sys; "
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); signal.pause()"
    )
    connections = []

    class Started(subprocess.Popen):
        """A process whose time begins when its child has started."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                connections.append(server.accept()[0])
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Started)
    with server:
        stage = stages.run("slow", program(text), 0.1)

    assert (stage.name, stage.status) == ("slow", "timed out")
    (connection,) = connections
    with connection:
        connection.settimeout(HANG_SECONDS)
        assert connection.recv(1) == b""  # the child has ended


def test_a_stage_without_time_is_skipped() -> None:
    stage = stages.run("late", program("raise SystemExit(1)"), 0)

    assert (stage.status, stage.detail) == ("skipped", "no time was left")


def test_output_of_a_stage_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "import sys; print('out'); print('bar\\r', 'why', file=sys.stderr); sys.exit(3)"
    )

    stage = stages.run("some", program(text), HANG_SECONDS)

    assert stage.detail == "exit status 3: why"
    captured = capsys.readouterr()
    assert captured.out == "out\n"
    assert "why" in captured.err


def test_without_an_error_the_last_output_is_the_reason() -> None:
    text = (
        "import sys; print('\\n'.join('abcde')); "
        "print('check:  50%|##  | 1/2\\rcheck: 100%|####| 2/2', file=sys.stderr); "
        "sys.exit(1)"
    )

    failed = stages.run("some", program(text), HANG_SECONDS)
    assert failed.detail == "exit status 1: c; d; e"
    silent = stages.run("some", program("raise SystemExit(4)"), HANG_SECONDS)
    assert silent.detail == "exit status 4: no message"


def test_a_failed_test_is_named(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite tests="4" failures="1" errors="1" skipped="1" '
        'hostname="sallys-mac"><testcase name="good"/><testcase name="bad[1]">'
        "<failure>x</failure></testcase><testcase name='worse'><error/></testcase>"
        "<testcase name='none'><skipped/></testcase></testsuite></testsuites>"
    )

    stage = mac._add_findings(
        Stage(name="tests", status="failed"), tmp_path, mac_file()
    )

    counts = "1 passed, 1 failed, 1 errors, 1 skipped"
    assert stage.detail == f"{counts}: bad[1], worse"


@pytest.mark.parametrize(
    ("result", "backend", "sentence"),
    [
        (mac_file(), "metal", "Please send it: attach x.json to a new issue"),
        (
            replace(mac_file(), products=[], generation=[], first_tokens=[]),
            "metal",
            "It has no times",
        ),
        (
            replace(mac_file(), products=[], generation=[], first_tokens=[]),
            "emulator",
            "no need to send it",
        ),
    ],
)
def test_the_last_lines_say_where_to_send_the_file(
    result: ResultFile, backend: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "backend", lambda: backend)

    said = mac._summary(result, Path("x.json"))

    assert sentence in said
    assert "no names of people, computers or folders" in said
    assert "http" not in said


def test_an_m5_times_tensor_operations_for_all_rows_of_the_document() -> None:
    document = (ROOT / "docs" / "m5.md").read_text(encoding="utf-8")
    (shape, _, listed) = mac.WHOLE.staged
    *rows, last = listed.split(",")
    n, k = map(int, shape.split("x"))

    assert f"{', '.join(rows)} and {last} rows of {shape}" in " ".join(document.split())
    assert {"6", "8", "9"} <= {*rows}
    for m in map(int, (*rows, last)):
        plan = planner.make(
            problem_of(m, n, k), device=devices.named("M5"), kernel="gemm_tensor"
        )
        assert plan.kernel == "gemm_tensor"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize(("words", "quick"), [((), False), (("QUICK=1",), True)])
def test_make_mac_runs_it(words: Sequence[str], quick: bool) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "mac", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    (line,) = [each for each in done.stdout.splitlines() if "benchmarks.mac" in each]
    assert line.endswith("-m benchmarks.mac --quick") == quick


def test_every_stage_has_a_limit_and_documents_it() -> None:
    text = (ROOT / "docs" / "first-mac.md").read_text(encoding="utf-8")

    assert len(text.split()) <= 500
    assert [*mac.LIMITS] == STAGES
    assert [name for name, _ in mac.commands(mac.WHOLE, Path("x"))] == STAGES
    for name, limit in mac.LIMITS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}`"))
        assert row.endswith(f"| {limit:.0f} s |")
    assert f"at most {mac.LIMIT:.0f} seconds" in text
    for work in (mac.WHOLE, mac.QUICK):
        assert all((ROOT / name).is_file() for name in work.tests)


def test_every_field_of_a_file_is_documented() -> None:
    text = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8")
    data = json.loads(result_file.text(mac_file()))

    names = {*data, *data["machine"], *data["stages"][0], *data["products"][0]}
    names |= {*data["generation"][0], *data["first_tokens"][0]}
    for name in names:
        assert f"`{name}`" in text or f'"{name}"' in text, name
