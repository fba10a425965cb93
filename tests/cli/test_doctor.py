"""`mlx-marlin doctor` says what runs our kernels here, and fails where nothing does."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

import metal_emulator
from benchmarks import mac
from cli.conftest import Run
from mlx_marlin import cache, guard, state
from mlx_marlin.backends import devices, measured_results, planner, result_files
from mlx_marlin.backends.metal import device
from mlx_marlin.cli import cache as cache_command
from mlx_marlin.cli import doctor_facts, installation
from mlx_marlin.cli.main import main
from mlx_marlin.guard import known_answers
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.measurement import STOCK, Forwards, Result, label
from mlx_marlin.planning.problem import Problem, problem_of
from support.choose import Choose
from support.marks import needs_emulator
from support.models import tiny_llama
from support.profiles import sampled

SECTIONS = [
    *("versions", "environment", "device", "back end", "compilers", "cache"),
    *("measured results", "checked kernels", "conclusion"),
]
Facts = Callable[..., Any]


@pytest.fixture(autouse=True)
def root(backend: Choose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Returns the root of a cache of the test's own."""
    place = tmp_path / "cache"
    monkeypatch.setattr(cache, "root", lambda: place)
    monkeypatch.delenv(measured_results.ENVIRONMENT)
    backend(None)
    return place


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a machine whose emulator runs our kernels."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    monkeypatch.setattr(metal_emulator, "unavailable", lambda: None)
    state.reset()


@pytest.fixture
def facts(capsys: pytest.CaptureFixture[str]) -> Facts:
    """Returns what runs the command, and returns what it prints as JSON."""

    def run(options: str = "", status: int = 0) -> Any:
        assert main(["doctor", "--json", *options.split()]) == status
        captured = capsys.readouterr()
        assert captured.err == ""
        found = json.loads(captured.out)
        assert found["ok"] == (status == 0)
        return found

    return run


@pytest.mark.usefixtures("runs")
def test_the_text_has_a_section_for_each_thing_and_a_conclusion(printed: Run) -> None:
    lines = printed("doctor").splitlines()

    assert [each for each in lines if not each.startswith(" ")] == SECTIONS
    assert lines[-1].startswith("  our kernels can run in the emulator")


@pytest.mark.usefixtures("runs")
def test_json_has_the_facts(facts: Facts, chip: Callable[..., None]) -> None:
    chip("M3 Max, 30 cores")

    found = facts()

    assert found["problems"] == []
    assert found["versions"]["mlx"] == mx.__version__
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["environment"][devices.ENVIRONMENT] == "M3 Max, 30 cores"
    assert found["device"]["generation"] == "M3"
    assert found["device"]["cores"] == 30
    assert found["device"]["source"] == "set by MLX_MARLIN_DEVICE"
    assert found["back_end"]["name"] == "emulator"
    assert "MLX has no GPU here" in found["back_end"]["reason"]
    assert found["compilers"].keys() == {"used", "identity", "unavailable"}
    assert found["verdicts"]["kernels"] == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("BACKEND", "stock", "stock MLX serves every call, because MLX_M"),
        ("BACKEND", "metal", "MLX_MARLIN_BACKEND='metal' needs a Metal"),
        ("BACKEND", "cuda", "MLX_MARLIN_BACKEND='cuda' needs a CUDA"),
        ("BACKEND", "rocm", "MLX_MARLIN_BACKEND='rocm' is not one of"),
        ("DEVICE", "M99", "MLX_MARLIN_DEVICE='M99': device 'M99' is not"),
    ],
)
@pytest.mark.usefixtures("runs")
def test_what_a_variable_prevents_is_a_problem(
    name: str,
    value: str,
    words: str,
    facts: Facts,
    printed: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(f"MLX_MARLIN_{name}", value)
    devices.current.cache_clear()
    state.reset()

    problems = facts(status=1)["problems"]
    said = printed("doctor", status=1)

    devices.current.cache_clear()
    assert words in problems[0]
    assert words in said.split("conclusion")[1]


@pytest.mark.parametrize("name", [None, "emulator"])
@pytest.mark.usefixtures("runs")
def test_an_emulator_that_cannot_run_is_a_problem(
    name: str | None,
    backend: Choose,
    facts: Facts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metal_emulator, "unavailable", lambda: "no clang was found")
    backend(name)

    found = facts(status=1)

    assert "no clang was found" in found["problems"][0]
    assert found["compilers"]["unavailable"] == "no clang was found"


@pytest.mark.usefixtures("runs")
def test_folders_are_told_with_size_and_rights(root: Path, facts: Facts) -> None:
    (root / "tuned").mkdir(parents=True)
    (root / "tuned").chmod(0o755)  # others may read it
    (root / "other").mkdir(mode=0o700)
    (root / "tuned" / "a").write_bytes(b"12345")
    (root / "other" / "b").write_bytes(b"123")

    told = {each["path"]: each for each in facts()["cache"]["folders"]}

    assert list(told) == [str(root), str(root / "other"), str(root / "tuned")]
    assert [each["bytes"] for each in told.values()] == [8, 3, 5]
    assert told[str(root / "other")]["rights"] == "drwx------"
    assert told[str(root / "tuned")]["rights"] == "drwxr-xr-x"


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("emulator", 0o777), ("verdicts", 0o770), ("verdicts/m3", 0o770)),
        *(("tuned", 0o775), ("models", 0o702), ("", None), ("tuned", None)),
    ],
)
@pytest.mark.usefixtures("runs")
def test_a_cache_that_cannot_be_used_is_a_problem(
    name: str, mode: int | None, root: Path, facts: Facts
) -> None:
    place = root / name
    if mode is None:
        place.parent.mkdir(exist_ok=True)
        place.write_text("")
        words = f"{place} is not a folder"
    else:
        place.mkdir(parents=True)
        place.chmod(mode)
        words = f"{place} can be written by other users (mode {mode:04o})"

    assert words in facts(status=1)["problems"][0]


def test_a_folder_that_cannot_be_made_or_is_another_users_is_unusable(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(dir: Path) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryFile", refused)
        missing = cache_command.describe(root).problem
        assert missing is not None
        assert missing.startswith(f"does not exist, and {tmp_path} cannot be written")
        assert "cannot be written to" in str(cache_command.describe(tmp_path).problem)
    assert cache_command.describe(root).problem is None
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert "belongs to the user" in str(cache_command.describe(tmp_path).problem)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("runs")
def test_tuned_results_are_counted(
    root: Path, facts: Facts, printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = root / "tuned"
    place.mkdir(parents=True)
    here = measured_results.machine(devices.current(), "emulator").file_name
    (place / here).write_text('{"results": [1, 2]}')
    (place / "another.json").write_text('{"results": [1]}')
    (place / "broken.json").write_text("{")

    found = facts()["tuned"]

    files = {each["name"]: each for each in found["files"]}
    assert [files[each]["results"] for each in (here, "another.json")] == [2, 1]
    assert files["broken.json"]["results"] is None
    assert [each for each in files if files[each]["this_machine"]] == [here]
    assert "are ignored" in found["ignored"][0]
    monkeypatch.setenv(measured_results.ENVIRONMENT, "0")
    said = printed("doctor")
    assert "switched off by MLX_MARLIN_TUNED=0" in said
    assert f"{here}: 2 results, this machine" in said
    assert "broken.json: not readable\n" in said


@pytest.mark.usefixtures("runs")
def test_a_failed_verdict_is_a_problem(
    facts: Facts, printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, failed = (
        {
            "kernel": name,
            "passed": reason is None,
            "state": "failed" if reason else "passed",
            "reason": reason,
            "example": "1 row",
        }
        for name, reason in (("marlin_gemv", None), ("marlin_gemm", "wrong numbers"))
    )
    verdicts = {"on": True, "kernels": [passed, failed]}
    monkeypatch.setattr(doctor_facts, "verdicts", lambda: verdicts)

    found = facts(status=1)

    assert found["verdicts"] == verdicts
    assert found["problems"] == ["marlin_gemm failed its check: wrong numbers"]
    said = printed("doctor", status=1)
    assert "1 of 2 sets of kernels passed" in said
    assert "marlin_gemm failed its check: wrong numbers (1 row)" in said


@needs_emulator
def test_check_runs_kernels_and_keeps_the_verdicts(
    facts: Facts, printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(guard.ENVIRONMENT, "1")
    printed("doctor --check --rows 1")
    verdicts = facts()["verdicts"]
    assert verdicts["on"]
    assert {each["passed"] for each in verdicts["kernels"]} == {True}
    assert len(verdicts["kernels"]) == 2  # float16 and bfloat16

    monkeypatch.setattr(known_answers, "fault_of", lambda _: "planted")
    said = printed("doctor --check --rows 3", status=1)
    assert "failed its check: planted" in said
    assert len(facts(status=1)["verdicts"]["kernels"]) == 4


@needs_emulator
@pytest.mark.parametrize("setting", ["", "0"])
def test_checks_do_not_contradict_that_calls_are_unchecked(
    setting: str, printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(guard.ENVIRONMENT, setting)

    section = printed("doctor --check --rows 1").partition("checked kernels\n")[2]

    passed, when, _ = section.split("\n", 2)
    assert passed == "  2 of 2 sets of kernels passed"
    assert when.startswith("  only --check checks kernels here, calls run them")
    assert ("MLX_MARLIN_GUARD=0 is set" in when) == (setting == "0")


@sampled(0, 1)
@needs_emulator
@pytest.mark.parametrize("name", ["M5 Pro", "M5", "M5 Max"])
def test_make_mac_checks_the_tensor_operations_of_an_m5(
    name: str, chip: Callable[..., None], backend: Choose, facts: Facts, printed: Run
) -> None:
    chip(name)
    backend("emulator")

    printed("doctor --check", *mac.WHOLE.doctor)

    kernels = facts()["verdicts"]["kernels"]
    passed = {each["kernel"] for each in kernels if each["passed"]}
    assert passed >= {"marlin_gemm_tensor", "marlin_tensor_layout"}
    # `gemv` serves few rows there, or none.
    assert any(kernel.startswith("marlin_gemm_register") for kernel in passed)


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Makes Metal seem available, and lists the plans whose kernels are checked."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(devices, "current", lambda *_: device.Device.named("M3 Max"))
    state.reset()
    plans: list[Any] = []
    monkeypatch.setattr(known_answers, "fault_of", plans.append)
    monkeypatch.setattr(known_answers, "fault_of_probe", lambda _: None)
    return plans


@pytest.mark.usefixtures("runs")
def test_what_was_measured_here_is_counted(facts: Facts, printed: Run) -> None:
    said = printed("doctor")
    assert "no product measured on this machine" in said
    assert "no model measured on this machine" in said

    results = []
    for m, stock, day in ((2, True, "24"), (8, False, "26"), (16, False, "25")):
        plan = planner.choose(problem_of(m, 64, 256), devices.current())
        times = {label(plan): 2.0, STOCK: 1.0}
        date = f"2026-11-{day}"
        results.append(
            Result(plan=plan, stock=stock, medians_us=times, clock="", date=date)
        )
    forwards = [
        Forwards(key=key, layout=layout, seconds={2: (1.0, ours)}, date="2026-11-26")
        for key, layout, ours in (
            ("a", "mlx", 0.5),
            ("b", "mlx", 2.0),
            ("c", "marlin", 2.0),  # stock MLX cannot read packed weights
        )
    ]
    here = measured_results.machine(devices.current(), "emulator")
    result_files.write(result_files.folder(), here, results, forwards)

    tuned = facts()["tuned"]

    assert [*tuned["products"].values()] == [3, 1, "2026-11-24", "2026-11-26"]
    assert [*tuned["models"].values()] == [3, 1, "2026-11-26", "2026-11-26"]
    said = printed("doctor")
    days = "2026-11-24 to 2026-11-26"
    assert f"3 products measured here, {days}: stock MLX serves 1 of them" in said
    day = "2026-11-26"
    assert f"3 models measured here, {day}: stock MLX serves some rows of 1" in said


def test_check_runs_the_kernels_that_serve(
    on_a_mac: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned_one = problem_of(2, 4096, 4096)
    plan = planner.compare(tuned_one).candidates[3].plan
    assert plan != planner.choose(tuned_one, devices.current())
    result = Result(
        plan=plan, stock=False, medians_us={label(plan): 1}, clock="", date=""
    )
    known = {tuned_one: result}
    monkeypatch.setattr(
        measured_results, "find", lambda problem, *_: known.get(problem)
    )
    many = problem_of(4096, 4096, 4096, layout="marlin")

    of_stock = doctor_facts.check([problem_of(1, 4096, 4096), tuned_one, many])

    assert on_a_mac == [plan, dequantize_plan(many)]
    (row,) = of_stock
    assert row["product"].startswith("1 row of 4096→4096")
    assert "by the table of Apple M3 Max" in row["reason"]


@pytest.mark.usefixtures("on_a_mac")
def test_products_of_stock_are_reported(printed: Run) -> None:
    said = printed("doctor --check --rows 1")
    assert said.count("stock MLX serves 1 row of 4096→4096, affine 4-bit") == 2
    found = json.loads(printed("doctor --check --rows 1 --json"))
    assert len(found["verdicts"]["stock"]) == 2
    assert "stock MLX serves" not in printed("doctor")


@pytest.mark.usefixtures("on_a_mac")
def test_a_check_that_cannot_be_made_is_a_problem(
    printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> str:
        raise MemoryError

    monkeypatch.setattr(known_answers, "fault_of", fails)
    said = printed("doctor --check --rows 8", status=1)
    assert "could not be checked: MemoryError: no message" in said
    state.reset()
    printed("doctor")


@pytest.mark.usefixtures("stock")
def test_check_needs_something_that_runs_kernels(refused: Run) -> None:
    said = "--check: MLX_MARLIN_BACKEND='stock' is set"
    assert said in refused("doctor --check")


@pytest.mark.usefixtures("runs")
def test_a_part_that_fails_hides_no_other(
    facts: Facts, printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such driver")

    monkeypatch.setattr(devices, "current", fails)
    monkeypatch.setattr("metal_emulator.compiling.compiler.find", fails)
    monkeypatch.setattr(cache_command, "listed", fails)

    found = facts(status=1)

    assert found["device"] == found["compilers"] == found["cache"]
    assert found["device"] == {"error": "RuntimeError: no such driver"}
    assert found["back_end"]["name"] == "emulator"
    said = printed("doctor", status=1)
    assert said.count("  RuntimeError: no such driver") == 4


def test_without_mlx_the_rest_is_told(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)

    assert "import of mlx.core halted" in facts(status=1)["problems"][0]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Lists the products whose kernels are to be checked."""
    products: list[Problem] = []

    def check(wanted: list[Problem]) -> list[Any]:
        products.extend(wanted)
        return []

    monkeypatch.setattr(doctor_facts, "check", check)
    return products


@pytest.mark.usefixtures("runs")
def test_common_kernels_are_checked_without_a_model(
    asked: list[Problem], printed: Run
) -> None:
    printed("doctor --check --rows 1,9")

    assert [(each.m, each.dtype) for each in asked] == [
        (m, dtype) for dtype in ("float16", "bfloat16") for m in (1, 9)
    ]
    formats = {(each.mode, each.bits, each.group_size) for each in asked}
    assert formats == {("affine", 4, 64)}


@pytest.mark.usefixtures("runs")
def test_the_kernels_of_a_model_are_checked(
    asked: list[Problem], printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tied=False)
    monkeypatch.setattr(mlx_lm, "load", lambda name, lazy: (model, name))

    printed("doctor --check --model some/model")

    assert {each.m for each in asked} == {1, 4, 8}
    assert len(asked) == len({*asked}) > 3
    printed("doctor")
    assert len(asked) == len({*asked})  # nothing is checked unasked


def test_the_versions_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])

    said = capsys.readouterr().out
    assert exited.value.code == 0
    assert said.startswith("mlx-marlin ")
    assert f"(mlx {mx.__version__}, mlx-lm {mlx_lm.__version__})" in said
    monkeypatch.setattr(installation, "installed", {"mlx-marlin": "1.2"}.get)
    assert installation.version_line() == "mlx-marlin 1.2"
