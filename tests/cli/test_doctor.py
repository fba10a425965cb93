"""`mlx-marlin doctor` says what runs our kernels here, and fails where nothing does."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest

import metal_emulator
from benchmarks import mac
from mlx_marlin import cache, guard, state
from mlx_marlin.backends import devices, planner, result_files, tuned_results
from mlx_marlin.backends.metal import device
from mlx_marlin.cli import cache_folders
from mlx_marlin.cli.doctor import installation, kernel_checks
from mlx_marlin.cli.main import COMMANDS, main
from mlx_marlin.guard import known_answers
from mlx_marlin.planning.dequantize_plan import dequantize_plan
from mlx_marlin.planning.measurement import STOCK, Forwards, Result, label
from mlx_marlin.planning.problem import Problem, problem_of
from support.choose import Choose
from support.marks import needs_emulator
from support.models import tiny_llama
from support.profiles import sampled

SECTIONS = (
    "versions",
    "environment",
    "device",
    "back end",
    "compilers",
    "cache",
    "tuned results",
    "tuned models",
    "checked kernels",
    "conclusion",
)


@pytest.fixture(autouse=True)
def root(backend: Choose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Returns the root of a cache of the test's own."""
    metal_emulator.unavailable()  # builds its run time in the user's cache, once
    place = tmp_path / "cache"
    monkeypatch.setattr(cache, "root", lambda: place)
    monkeypatch.delenv(tuned_results.ENVIRONMENT)
    backend(None)
    return place


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a machine whose emulator runs our kernels."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    monkeypatch.setattr(metal_emulator, "unavailable", lambda: None)
    state.reset()


def found(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any]:
    """Returns the status of the command and what it prints as JSON."""
    status = main(["doctor", "--json", *options])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, json.loads(captured.out)


@pytest.mark.usefixtures("runs")
def test_the_text_has_a_section_for_each_thing_and_a_conclusion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0

    printed = capsys.readouterr().out.splitlines()
    assert tuple(each for each in printed if not each.startswith(" ")) == SECTIONS
    assert printed[-1].startswith("  our kernels can run in the emulator")


@pytest.mark.usefixtures("runs")
def test_json_has_the_facts(
    capsys: pytest.CaptureFixture[str], chip: Callable[..., None]
) -> None:
    chip("M3 Max, 30 cores")

    status, facts = found(capsys)

    assert (status, facts["ok"], facts["problems"]) == (0, True, [])
    assert facts["versions"]["mlx"] == mx.__version__
    assert facts["versions"]["python"] == sys.version.split()[0]
    assert facts["environment"][devices.ENVIRONMENT] == "M3 Max, 30 cores"
    assert facts["device"]["generation"] == "M3"
    assert facts["device"]["cores"] == 30
    assert facts["device"]["source"] == "set by MLX_MARLIN_DEVICE"
    assert facts["back_end"]["name"] == "emulator"
    assert "MLX has no GPU here" in facts["back_end"]["reason"]
    assert facts["compilers"].keys() == {"used", "identity", "unavailable"}
    assert facts["verdicts"]["kernels"] == []


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MLX_MARLIN_BACKEND": "stock"}, "stock MLX serves every call, because MLX_M"),
        ({"MLX_MARLIN_BACKEND": "metal"}, "MLX_MARLIN_BACKEND='metal' needs a Metal"),
        ({"MLX_MARLIN_BACKEND": "cuda"}, "MLX_MARLIN_BACKEND='cuda' needs a CUDA"),
        ({"MLX_MARLIN_BACKEND": "rocm"}, "MLX_MARLIN_BACKEND='rocm' is not one of"),
        ({"MLX_MARLIN_DEVICE": "M99"}, "MLX_MARLIN_DEVICE='M99': device 'M99' is not"),
    ],
)
@pytest.mark.usefixtures("runs")
def test_what_a_variable_prevents_is_a_problem(
    variables: dict[str, str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    devices.current.cache_clear()
    state.reset()

    status, facts = found(capsys)

    devices.current.cache_clear()
    assert (status, facts["ok"]) == (1, False)
    assert words in facts["problems"][0]
    assert main(["doctor"]) == 1
    assert words in capsys.readouterr().out.split("conclusion")[1]
    devices.current.cache_clear()


@pytest.mark.parametrize("name", [None, "emulator"])
def test_an_emulator_that_cannot_run_is_a_problem(
    name: str | None,
    backend: Choose,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    monkeypatch.setattr(metal_emulator, "unavailable", lambda: "no clang was found")
    backend(name)

    status, facts = found(capsys)

    assert status == 1
    assert "no clang was found" in facts["problems"][0]
    assert facts["compilers"]["unavailable"] == "no clang was found"


@pytest.mark.usefixtures("runs")
def test_folders_are_told_with_size_and_rights(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "tuned").mkdir(parents=True)
    (root / "tuned").chmod(0o755)  # others may read it
    (root / "other").mkdir(mode=0o700)
    (root / "tuned" / "a").write_bytes(b"12345")
    (root / "other" / "b").write_bytes(b"123")

    status, facts = found(capsys)

    told = {each["path"]: each for each in facts["cache"]["folders"]}
    assert status == 0
    assert list(told) == [str(root), str(root / "other"), str(root / "tuned")]
    assert [each["bytes"] for each in told.values()] == [8, 3, 5]
    assert told[str(root / "other")]["rights"] == "drwx------"
    assert told[str(root / "tuned")]["rights"] == "drwxr-xr-x"


def _writable(name: str, mode: int) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        (root / name).mkdir(parents=True)
        (root / name).chmod(mode)

    return damage


def _file(root: Path) -> None:
    root.write_text("")


def _file_in_a_folders_place(root: Path) -> None:
    root.mkdir()
    (root / "tuned").write_text("")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_writable("emulator", 0o777), "emulator can be written by other users (mode"),
        (_writable("verdicts", 0o770), "verdicts can be written by other users (mode"),
        (_writable("verdicts/m3", 0o770), "verdicts/m3 can be written by other users"),
        (_writable("tuned", 0o775), "tuned can be written by other users (mode 0775)"),
        (_writable("models", 0o702), "models can be written by other users (mode 0702"),
        (_file, "cache is not a folder"),
        (_file_in_a_folders_place, "tuned is not a folder"),
    ],
)
@pytest.mark.usefixtures("runs")
def test_a_cache_that_cannot_be_used_is_a_problem(
    damage: Callable[[Path], None],
    words: str,
    root: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(root)

    status, facts = found(capsys)

    assert status == 1
    assert words in facts["problems"][0]


def test_a_folder_that_cannot_be_made_or_is_another_users_is_unusable(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(dir: Path) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryFile", refused)
        missing = cache_folders.describe(root).problem
        assert missing is not None
        assert missing.startswith(f"does not exist, and {tmp_path} cannot be written")
        assert "cannot be written to" in str(cache_folders.describe(tmp_path).problem)
    assert cache_folders.describe(root).problem is None
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert "belongs to the user" in str(cache_folders.describe(tmp_path).problem)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("runs")
def test_tuned_results_are_counted(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = root / "tuned"
    place.mkdir(parents=True)
    here = tuned_results.machine(devices.current(), "emulator").file_name
    (place / here).write_text('{"results": [1, 2]}')
    (place / "another.json").write_text('{"results": [1]}')
    (place / "broken.json").write_text("{")

    status, facts = found(capsys)

    assert status == 0
    files = {each["name"]: each for each in facts["tuned"]["files"]}
    assert [files[each]["results"] for each in (here, "another.json")] == [2, 1]
    assert files["broken.json"]["results"] is None
    assert [each for each in files if files[each]["this_machine"]] == [here]
    assert "are ignored" in facts["tuned"]["ignored"][0]
    monkeypatch.setenv(tuned_results.ENVIRONMENT, "0")
    assert main(["doctor"]) == 0
    assert "switched off by MLX_MARLIN_TUNED=0" in capsys.readouterr().out


@pytest.mark.usefixtures("runs")
def test_a_failed_verdict_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr(kernel_checks, "verdicts", lambda: verdicts)

    status, facts = found(capsys)

    assert (status, facts["verdicts"]) == (1, verdicts)
    assert facts["problems"] == ["marlin_gemm failed its check: wrong numbers"]
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 sets of kernels passed" in printed
    assert "marlin_gemm failed its check: wrong numbers (1 row)" in printed


@needs_emulator
def test_check_runs_kernels_and_keeps_the_verdicts(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(guard.ENVIRONMENT, "1")
    assert main(["doctor", "--check", "--rows", "1"]) == 0
    capsys.readouterr()
    status, facts = found(capsys)
    assert status == 0
    assert facts["verdicts"]["on"]
    assert {each["passed"] for each in facts["verdicts"]["kernels"]} == {True}
    assert len(facts["verdicts"]["kernels"]) == 2  # float16 and bfloat16

    monkeypatch.setattr(known_answers, "fault_of", lambda _: "planted")
    assert main(["doctor", "--check", "--rows", "3"]) == 1
    assert "failed its check: planted" in capsys.readouterr().out
    status, facts = found(capsys)
    assert status == 1
    assert len(facts["verdicts"]["kernels"]) == 4


@needs_emulator
@pytest.mark.parametrize("setting", ["", "0"])
def test_checks_do_not_contradict_that_calls_are_unchecked(
    setting: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(guard.ENVIRONMENT, setting)

    assert main(["doctor", "--check", "--rows", "1"]) == 0

    section = capsys.readouterr().out.partition("checked kernels\n")[2]
    passed, when, _ = section.split("\n", 2)
    assert passed == "  2 of 2 sets of kernels passed"
    assert when.startswith("  only --check checks kernels here, calls run them")
    assert ("MLX_MARLIN_GUARD=0 is set" in when) == (setting == "0")


@sampled(1)
@needs_emulator
@pytest.mark.parametrize("name", ["M5", "M5 Pro", "M5 Max"])
def test_make_mac_checks_the_tensor_operations_of_an_m5(
    name: str,
    chip: Callable[..., None],
    backend: Choose,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chip(name)
    backend("emulator")

    assert main(["doctor", "--check", *mac.WHOLE.doctor]) == 0
    capsys.readouterr()  # a progress bar too
    _, facts = found(capsys)

    passed = {each["kernel"] for each in facts["verdicts"]["kernels"] if each["passed"]}
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
def test_what_was_measured_here_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
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
    here = tuned_results.machine(devices.current(), "emulator")
    result_files.write(result_files.folder(), here, results, forwards)

    status, facts = found(capsys)

    assert status == 0
    tuned = facts["tuned"]
    assert [*tuned["products"].values()] == [3, 1, "2026-11-24", "2026-11-26"]
    assert [*tuned["models"].values()] == [3, 1, "2026-11-26", "2026-11-26"]
    main(["doctor"])
    said = capsys.readouterr().out
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
    monkeypatch.setattr(tuned_results, "find", lambda problem, *_: known.get(problem))
    many = problem_of(4096, 4096, 4096, layout="marlin")

    of_stock = kernel_checks.check([problem_of(1, 4096, 4096), tuned_one, many])

    assert on_a_mac == [plan, dequantize_plan(many)]
    (row,) = of_stock
    assert row["product"].startswith("1 row of 4096→4096")
    assert "bound by reading the weight" in row["reason"]


@pytest.mark.usefixtures("on_a_mac")
def test_products_of_stock_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--check", "--rows", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("stock MLX serves 1 row of 4096→4096, affine 4-bit") == 2
    assert main(["doctor", "--check", "--rows", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["verdicts"]["stock"]) == 2
    assert main(["doctor"]) == 0
    assert "stock MLX serves" not in capsys.readouterr().out


def test_a_check_that_cannot_be_made_is_a_problem(
    on_a_mac: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: Any) -> str:
        raise MemoryError

    monkeypatch.setattr(known_answers, "fault_of", fails)
    assert main(["doctor", "--check", "--rows", "8"]) == 1
    printed = capsys.readouterr().out
    assert "could not be checked: MemoryError: no message" in printed
    state.reset()
    assert main(["doctor"]) == 0


@pytest.mark.usefixtures("stock")
def test_check_needs_something_that_runs_kernels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--check"]) == 2
    assert "--check: MLX_MARLIN_BACKEND='stock' is set" in capsys.readouterr().err


@pytest.mark.usefixtures("runs")
def test_a_part_that_fails_hides_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such driver")

    monkeypatch.setattr(devices, "current", fails)
    monkeypatch.setattr("metal_emulator.compiling.compiler.find", fails)
    monkeypatch.setattr(cache_folders, "listed", fails)

    status, facts = found(capsys)

    assert status == 1
    assert facts["device"] == facts["compilers"] == facts["cache"]
    assert facts["device"] == {"error": "RuntimeError: no such driver"}
    assert facts["back_end"]["name"] == "emulator"
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.count("  RuntimeError: no such driver") == 4


def test_without_mlx_the_rest_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)

    status, facts = found(capsys)

    assert status == 1
    assert "import of mlx.core halted" in facts["problems"][0]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Lists the products whose kernels are to be checked."""
    products: list[Problem] = []

    def check(wanted: list[Problem]) -> list[Any]:
        products.extend(wanted)
        return []

    monkeypatch.setattr(kernel_checks, "check", check)
    return products


@pytest.mark.usefixtures("runs")
def test_common_kernels_are_checked_without_a_model(asked: list[Problem]) -> None:
    assert main(["doctor", "--check", "--rows", "1,9"]) == 0

    assert [(each.m, each.dtype) for each in asked] == [
        (1, "float16"),
        (9, "float16"),
        (1, "bfloat16"),
        (9, "bfloat16"),
    ]
    assert {(each.mode, each.bits, each.group_size) for each in asked} == {
        ("affine", 4, 64)
    }


@pytest.mark.usefixtures("runs")
def test_the_kernels_of_a_model_are_checked(
    asked: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tied=False)
    monkeypatch.setattr(mlx_lm, "load", lambda name, lazy: (model, name))

    assert main(["doctor", "--check", "--model", "some/model"]) == 0

    assert {each.m for each in asked} == {1, 4, 8}
    assert len(asked) == len({*asked}) > 3
    assert main(["doctor"]) == 0
    assert len(asked) == len({*asked})  # nothing is checked unasked


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--rows 1,4", "--rows 1,4 requires --check"),
        ("--model some/model", "--model some/model requires --check"),
        ("--check --rows 1,x", "--rows '1,x', expected numbers such as 1,2,4,8"),
        ("--check --rows 0", "--rows '0', expected numbers such as 1,2,4,8"),
        ("--check --model /none", "/none: no such folder or file"),
        ("--check --model a/plain", "'a/plain' has no quantized linear layer"),
    ],
)
def test_a_wrong_option_is_told_in_a_line(
    options: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "plain" in options:
        monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: (nn.Linear(8, 8), 0))

    assert main(["doctor", *options.split()]) == 2

    *notes, said = capsys.readouterr().err.splitlines()
    assert words in said
    assert all(note.startswith("loading a/plain") for note in notes)


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


def test_help_lists_every_command_in_a_line_the_most_useful_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])

    said = capsys.readouterr().out
    commands, _, _ = said.split("COMMAND\n")[1].partition("\n\n")
    listed = [line.split(maxsplit=1) for line in commands.splitlines()]
    assert listed == [[name, text] for name, (_, text) in COMMANDS.items()]
    assert listed[0][0] == "plan"
