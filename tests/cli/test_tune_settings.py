"""`mlx-marlin tune MODEL` ends with the model itself, and what other commands tell."""

import json
import os
import re
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

import mlx_marlin
from cli.conftest import Run
from mlx_marlin import cache, state
from mlx_marlin.backends import devices, measured_results, result_files, selection
from mlx_marlin.backends.metal import detection
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.cli import models
from mlx_marlin.cli.main import main
from mlx_marlin.lm import measured_models
from mlx_marlin.lm.measured_models import VARIABLE, MeasuredModel
from mlx_marlin.lm.race import conditions, settings_race
from mlx_marlin.lm.race.settings import DEFAULTS, Comparison, ModelSettings
from mlx_marlin.lm.race.settings_race import Arms, Job, Value
from mlx_marlin.planning.measurement import Machine
from support.choose import Choose
from support.models import tiny_llama
from support.processes import run_python

JOINED = ModelSettings(join=True)
Speeds = dict[Any, float]


@pytest.fixture(autouse=True)
def root(backend: Choose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Returns the root of a cache of the test's own, on a machine with Metal."""
    place = tmp_path / "cache"
    monkeypatch.setattr(cache, "root", lambda: place)
    monkeypatch.setattr(selection, "has_device", lambda name: name == "metal")
    monkeypatch.delenv(measured_results.ENVIRONMENT)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: (tiny_llama(), None))
    monkeypatch.setattr(conditions, "why_not", lambda *_: "there is no clock")
    device = Device.named("M3 Max", 30)
    monkeypatch.setattr(devices, "current", lambda *_: device)
    monkeypatch.setattr(detection, "chip_name", lambda: device.name)
    monkeypatch.setattr(detection, "gpu_cores", lambda: device.cores)
    backend(None)
    return place


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Speeds:
    """Stands in for clocks: speeds by settings and values. Products take no time."""
    found: Speeds = {}

    def compare(self: Arms, settings: ModelSettings) -> Comparison:
        speed = found.get(settings, 1.0)
        if speed == 0:
            return Comparison(settings=settings, excluded="other logits")
        return Comparison(
            settings=settings, seconds=dict.fromkeys(self.rows, (speed, 1.0))
        )

    def measure(job: Job, value: Value) -> settings_race.Run:
        samples = {m: [1 / found.get(value, 1.0)] for m in job.rows}
        return samples, []

    monkeypatch.setattr(Arms, "compare", compare)
    monkeypatch.setattr(settings_race, "measure", measure)
    monkeypatch.setattr("mlx_marlin.cli.tune._tune", lambda *_: 0)
    monkeypatch.setattr(models, "clock", lambda *_: object())
    return found


def is_joined() -> bool:
    model = mlx_marlin.optimize(tiny_llama())
    return "joined" in model.layers[0].self_attn.q_proj


def kept() -> MeasuredModel | None:
    state.reset()
    return measured_models.find(tiny_llama())


def verdict() -> MeasuredModel:
    found = kept()
    assert found is not None
    return found


def test_what_wins_is_kept_and_used(speeds: Speeds, printed: Run) -> None:
    speeds |= {JOINED: 1.2, ModelSettings(trace=True): 0, 200: 1.1}
    assert not is_joined()

    out = printed("tune some/model --streams 1,4")

    assert "some/model: speed relative to stock MLX, by rows of a forward pass" in out
    assert f"{VARIABLE}: speed relative to MLX's own value, by rows" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["join", "1.200", "1.200", "faster"] in lines
    assert ["defaults", "1.000", "1.000", "no", "difference"] in lines
    assert ["trace", "not", "used:", "other", "logits"] in lines
    assert ["200", "1.100", "1.100", "faster"] in lines
    assert "optimize(model) uses join from now on" in out
    assert f"{VARIABLE}=200 is faster: `mlx-marlin lm` sets it" in out
    found = verdict()
    assert (found.model, found.settings) == ("some/model", JOINED)
    assert found.speedups == {1: 1.2, 4: 1.2}
    assert found.max_ops_per_buffer == 200
    assert is_joined()
    (file,) = result_files.folder().glob("*.json")
    assert f"kept in {file}" in out


def test_a_tie_keeps_the_defaults_and_a_loss_stock_mlx(
    speeds: Speeds, printed: Run
) -> None:
    out = printed("tune some/model")
    assert (verdict().settings, verdict().max_ops_per_buffer) == (DEFAULTS, None)
    assert "optimize(model) uses defaults from now on" in out

    speeds[DEFAULTS] = 0.9
    out = printed("tune some/model")
    assert verdict().settings is None
    assert "optimize(model) leaves such models to stock MLX from now on" in out


def test_without_a_comparison_nothing_is_kept(
    speeds: Speeds, monkeypatch: pytest.MonkeyPatch, printed: Run
) -> None:
    def fail(self: Arms, settings: ModelSettings) -> Comparison:
        return Comparison(settings=settings, excluded="RuntimeError: out of memory")

    monkeypatch.setattr(Arms, "compare", fail)

    out = printed("tune some/model")

    assert "not used: RuntimeError: out of memory" in out
    assert "nothing is kept: no settings could be compared with stock MLX" in out
    assert VARIABLE not in out
    assert kept() is None


@pytest.mark.parametrize("found", [None, ([], 3)])
def test_the_folder_is_checked_before_anything_is_measured(
    found: object,
    speeds: Speeds,
    printed: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also for a model without products that our kernels compute."""
    if found:
        monkeypatch.setattr(models, "products", lambda *_: found)
    result_files.folder().mkdir(parents=True)
    result_files.folder().chmod(0o777)

    assert main(["tune", "some/model"]) == 2

    out, said = capsys.readouterr()
    assert "speed relative to stock MLX" not in out
    assert f"the results cannot be kept in {result_files.folder()}: " in said
    assert "can be written by other users" in said
    printed("tune some/model --dry-run")


def test_an_interrupted_search_keeps_no_verdict(
    speeds: Speeds, printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds[JOINED] = 1.2

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(settings_race, "measure", interrupt)

    printed("tune some/model", status=130)
    assert kept() is None


def test_the_models_are_freed_before_the_processes_load_theirs(
    speeds: Speeds, printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[weakref.ref[Arms]] = []
    alive: list[bool] = []
    compare, measure = Arms.compare, settings_race.measure

    def noting(self: Arms, settings: ModelSettings) -> Comparison:
        compared.append(weakref.ref(self))
        return compare(self, settings)

    def checking(job: Job, value: Value) -> settings_race.Run:
        alive.extend(each() is not None for each in compared)
        return measure(job, value)

    monkeypatch.setattr(Arms, "compare", noting)
    monkeypatch.setattr(settings_race, "measure", checking)

    printed("tune some/model")

    assert {*alive} == {False}


@pytest.mark.parametrize("status", [0, 1])
def test_products_are_kept_before_the_model_is_measured(
    status: int, speeds: Speeds, printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def products(*_: object) -> int:
        events.append("all")
        return status

    monkeypatch.setattr("mlx_marlin.cli.tune._tune", products)
    monkeypatch.setattr(
        "mlx_marlin.cli.tune_model.tune", lambda name, *_: events.append(name)
    )

    printed("tune 8x64x128 a/b c/d a/b", status=status)

    assert events == ["all", "a/b", "c/d"]


@pytest.mark.parametrize("arguments", ["some/model --no-model", "8x64x128"])
def test_nothing_but_products_is_measured_on_request(
    speeds: Speeds, arguments: str, printed: Run
) -> None:
    speeds[JOINED] = 2.0

    printed(f"tune {arguments}")

    assert kept() is None


def test_without_time_the_rest_is_listed(speeds: Speeds, printed: Run) -> None:
    speeds[JOINED] = 2.0

    out = printed("tune some/model --max-minutes 1e-9")

    assert out.count("no time") == 8  # seven settings and the values of MLX's variable
    assert verdict().settings == DEFAULTS


@pytest.mark.parametrize("name", ["emulator", "cuda"])
def test_nothing_is_measured_without_a_clock(
    speeds: Speeds, backend: Choose, printed: Run, name: str
) -> None:
    speeds[JOINED] = 2.0
    backend(name)

    said = printed("tune some/model --dtype float16")

    assert "the settings of `optimize` are not measured: " in said
    assert not [*result_files.folder().glob("*.json")]


def test_a_dry_run_lists_the_settings(speeds: Speeds, printed: Run) -> None:
    out = printed("tune some/model --dry-run")

    assert "passes of 1,4,8 rows with defaults; trace; join; " in out
    assert kept() is None


def write(folder: Path | None = None, **others: Any) -> Path:
    fields: dict[str, Any] = {
        "model": folder.name if folder else "tiny",
        "key": measured_models.model_key(tiny_llama()),
        "settings": JOINED,
        "speedups": {1: 1.25},
        "max_ops_per_buffer": 200,
        "date": "2026-11-25",
    }
    file = measured_models.keep(MeasuredModel(**fields | others))
    state.reset()
    return file


def test_doctor_tells_the_settings_and_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def doctor(*options: str) -> str:
        main(["doctor", *options])  # here is no Metal: its status is that of a problem
        return capsys.readouterr().out

    file = write()
    export = f"export {VARIABLE}=200 before MLX starts"

    out = doctor()
    line = "tiny: join, measured here on 2026-11-25: 1.25 times stock MLX at 1 rows"
    assert line in out
    assert export in out
    (found,) = json.loads(doctor("--json"))["tuned"]["settings"]
    assert found["max_ops_per_buffer"] == 200
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "200")
        assert export not in doctor()
    with monkeypatch.context() as patch:
        patch.setenv(measured_results.ENVIRONMENT, "0")
        out = doctor()
    assert export not in out
    assert out.count("switched off by MLX_MARLIN_TUNED=0") == 1
    write(date=5)
    said = f"measured settings of a model in {file.parent} are ignored: "
    assert re.search(f"{re.escape(said)}.*date is 5, expected str", doctor())


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Lists the variable when mlx-lm's `generate`, which does nothing, begins."""
    found: list[str | None] = []
    generate = sys.modules["mlx_lm.generate"]
    monkeypatch.setattr(generate, "main", lambda: found.append(os.getenv(VARIABLE)))
    monkeypatch.setattr("mlx_marlin.lm.auto.install", lambda *_: True)
    monkeypatch.setenv(VARIABLE, "")  # so that the test's end takes it away
    return found


def test_lm_sets_what_won(
    folder: Path,
    called: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    write(folder)
    model = ["--model", str(folder)]

    def variable(*before: str, arguments: list[str] = model) -> str | None:
        assert main(["lm", *before, "generate", *arguments]) == 0
        value = called[-1]
        monkeypatch.setenv(VARIABLE, "")
        return value or None

    assert variable() == "200"
    assert variable(arguments=[f"--model={folder}", "--prompt", "x"]) == "200"
    assert variable(arguments=["--prompt", "--model"]) is None
    other = shutil.copytree(folder, tmp_path / "other")
    assert variable(arguments=["--model", str(other)]) is None
    assert variable("--join") is None
    for name in (*measured_models.CHOICES, measured_results.ENVIRONMENT):
        with monkeypatch.context() as patch:
            patch.setenv(name, "0")
            assert variable() is None
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "77")
        assert main(["lm", "generate", *model]) == 0
        assert called[-1] == "77"
    for others in ({"max_ops_per_buffer": None}, {"model": "another"}):
        write(folder, **others)
        assert variable() is None
    write(folder)
    assert variable() == "200"


@pytest.mark.parametrize("name", ["chip", "cores", "system", "mlx", "kernels"])
def test_lm_sets_nothing_that_another_machine_measured(folder: Path, name: str) -> None:
    file = write(folder)
    whole = json.loads(file.read_text("utf-8"))
    whole["machine"][name] = 7 if name == "cores" else "another"
    file.write_text(json.dumps(whole))
    file.rename(file.with_name(Machine(**whole["machine"]).file_name))

    measured_models.set_for_model(["--model", str(folder)])

    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("chip", "cores"), [("Apple M9 Max", 12), ("Apple M9 Max", None), ("M3 Max", None)]
)
def test_lm_knows_its_machine_without_mlx(
    folder: Path, chip: str, cores: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a chip that is not in the table, and where macOS does not tell the cores."""
    monkeypatch.setattr(detection, "chip_name", lambda: chip)
    monkeypatch.setattr(detection, "gpu_cores", lambda: cores)
    monkeypatch.setattr(detection, "_metal", lambda: (chip, "applegpu_g21s"))
    monkeypatch.setattr(devices, "current", lambda *_: detection.detect_device())
    write(folder)

    measured_models.set_for_model(["--model", str(folder)])

    assert os.environ.pop(VARIABLE) == "200"


def test_lm_takes_the_newest_of_a_name_beside_a_damaged_file(folder: Path) -> None:
    write(key="0", max_ops_per_buffer=100, date="2026-11-26")
    for key in ("1", "3"):
        write(folder, key=key, max_ops_per_buffer=100, date="2026-11-24")
    file = write(folder, key="2")
    file.with_name(f"{file.name.rpartition('-')[0]}-4.json").write_text("{")

    measured_models.set_for_model(["--model", str(folder)])

    assert os.environ.pop(VARIABLE) == "200"


def test_the_variable_is_set_before_mlx_is_imported(folder: Path, root: Path) -> None:
    write(folder)
    code = f"""
import os, sys
from pathlib import Path
from mlx_marlin import cache
cache.root = lambda: Path({str(root)!r})
from mlx_marlin.backends.metal import detection
from mlx_marlin.cli import lm
from mlx_marlin.lm import measured_models
detection.chip_name, detection.gpu_cores = lambda: "Apple M3 Max", lambda: 30
measured_models.set_for_model(["--model", {str(folder)!r}])
print(os.environ[{VARIABLE!r}], [name for name in sys.modules if name == "mlx.core"])
"""
    done = run_python(code)
    assert done.stdout == "200 []\n", done.stderr


def test_a_folder_is_kept_by_its_name(
    folder: Path, speeds: Speeds, printed: Run
) -> None:
    printed("tune", folder)

    assert verdict().model == folder.name
