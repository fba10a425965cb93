"""`mlx-marlin tune MODEL` ends with the model itself, and what other commands tell."""

import json
import os
import shutil
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

import mlx_marlin
from cli.conftest import Run
from mlx_marlin import cache, state
from mlx_marlin.backends import selection, tuned_results
from mlx_marlin.cli import models
from mlx_marlin.cli.main import main
from mlx_marlin.lm.model_tuning import environment as values_of_mlx
from mlx_marlin.lm.model_tuning.comparison import Comparison
from mlx_marlin.lm.model_tuning.environment import Job, Value
from mlx_marlin.lm.model_tuning.generations import Generations
from mlx_marlin.lm.race import conditions
from mlx_marlin.lm.tuned_models import environment, lookup, machine, model_key, results
from mlx_marlin.lm.tuned_models.results import TunedModel
from mlx_marlin.lm.tuned_models.settings import DEFAULTS, ModelSettings
from support.choose import Choose
from support.models import tiny_llama
from support.processes import run_python

JOINED = ModelSettings(join=True)
VARIABLE = environment.VARIABLE
Speeds = dict[Any, float]


@pytest.fixture(autouse=True)
def root(backend: Choose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Returns the root of a cache of the test's own, on a machine with Metal."""
    place = tmp_path / "cache"
    monkeypatch.setattr(cache, "root", lambda: place)
    monkeypatch.setattr(selection, "has_device", lambda name: name == "metal")
    monkeypatch.delenv(tuned_results.ENVIRONMENT)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: (tiny_llama(), None))
    monkeypatch.setattr(conditions, "why_not", lambda *_: "there is no clock")
    backend(None)
    return place


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Speeds:
    """Stands in for clocks: speeds by settings and values. Products take no time."""
    found: Speeds = {}

    def compare(self: Generations, settings: ModelSettings) -> Comparison:
        speed = found.get(settings, 1.0)
        if speed == 0:
            return Comparison(settings=settings, excluded="other tokens")
        return Comparison(
            settings=settings, speedups=dict.fromkeys(self.streams, speed)
        )

    def measure(job: Job, value: Value) -> values_of_mlx.Run:
        steps = dict.fromkeys(job.streams, 1 / found.get(value, 1.0))
        return values_of_mlx.Run(
            value=str(value), steps=steps, prompts=steps, tokens=[]
        )

    monkeypatch.setattr(Generations, "compare", compare)
    monkeypatch.setattr(values_of_mlx, "measure", measure)
    monkeypatch.setattr("mlx_marlin.cli.tune.command._tune", lambda *_: 0)
    monkeypatch.setattr(models, "clock", lambda *_: object())
    return found


def is_joined() -> bool:
    model = mlx_marlin.optimize(tiny_llama())
    return "joined" in model.layers[0].self_attn.q_proj


def kept() -> TunedModel | None:
    state.reset()
    return lookup.find(tiny_llama())


def verdict() -> TunedModel:
    found = kept()
    assert found is not None
    return found


def test_what_wins_is_kept_and_used(speeds: Speeds, printed: Run) -> None:
    speeds |= {JOINED: 1.2, ModelSettings(trace=True): 0, 200: 1.1}
    assert not is_joined()

    out = printed("tune some/model --streams 1,4")

    assert "some/model: speed relative to stock MLX, by streams" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["join", "1.200", "1.200", "faster"] in lines
    assert ["defaults", "1.000", "1.000", "no", "difference"] in lines
    assert ["trace", "not", "used:", "other", "tokens"] in lines
    assert ["200", "1.100", "1.100", "faster"] in lines
    assert "optimize(model) uses join from now on" in out
    assert f"{VARIABLE}=200 is faster: `mlx-marlin lm` sets it" in out
    found = verdict()
    assert (found.model, found.settings) == ("some/model", JOINED)
    assert found.speedups == {1: 1.2, 4: 1.2}
    assert found.max_ops_per_buffer == 200
    assert is_joined()
    assert str(results.folder() / results.file_name(machine.here(), found.key)) in out


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
    def fail(self: Generations, settings: ModelSettings) -> Comparison:
        return Comparison(settings=settings, excluded="RuntimeError: out of memory")

    monkeypatch.setattr(Generations, "compare", fail)

    out = printed("tune some/model")

    assert "not used: RuntimeError: out of memory" in out
    assert "nothing is kept: no settings could be compared with stock MLX" in out
    assert VARIABLE not in out
    assert kept() is None


def test_the_folder_is_checked_before_anything_is_measured(
    speeds: Speeds, root: Path, printed: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    root.mkdir()
    (root / results.FOLDER).mkdir()
    (root / results.FOLDER).chmod(0o777)

    assert main(["tune", "some/model"]) == 2

    out, said = capsys.readouterr()
    assert "speed relative to stock MLX" not in out
    assert f"the results cannot be kept in {results.folder()}: " in said
    assert "can be written by other users" in said
    printed("tune some/model --no-model")
    printed("tune some/model --dry-run")


def test_an_interrupted_search_keeps_no_verdict(
    speeds: Speeds, printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds[JOINED] = 1.2

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(values_of_mlx, "measure", interrupt)

    printed("tune some/model", status=130)
    assert kept() is None


def test_the_models_are_freed_before_the_processes_load_theirs(
    speeds: Speeds, printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[weakref.ref[Generations]] = []
    alive: list[bool] = []
    compare, measure = Generations.compare, values_of_mlx.measure

    def noting(self: Generations, settings: ModelSettings) -> Comparison:
        compared.append(weakref.ref(self))
        return compare(self, settings)

    def checking(job: Job, value: Value) -> values_of_mlx.Run:
        alive.extend(each() is not None for each in compared)
        return measure(job, value)

    monkeypatch.setattr(Generations, "compare", noting)
    monkeypatch.setattr(values_of_mlx, "measure", checking)

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

    monkeypatch.setattr("mlx_marlin.cli.tune.command._tune", products)
    monkeypatch.setattr(
        "mlx_marlin.cli.tune.command.model.tune", lambda name, *_: events.append(name)
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
    assert not results.folder().exists()


def test_a_dry_run_lists_the_settings(speeds: Speeds, printed: Run) -> None:
    out = printed("tune some/model --dry-run")

    assert "generation at 1,4,8 streams with defaults; trace; join; " in out
    assert kept() is None


def write(folder: Path | None = None, **others: Any) -> Path:
    key = model_key.key_of_model_name(str(folder)) if folder else ""
    return results.write(
        machine.here(),
        TunedModel(
            **{
                "model": "tiny",
                "key": model_key.model_key(tiny_llama()),
                "config": key,
                "settings": JOINED,
                "speedups": {1: 1.25},
                "max_ops_per_buffer": 200,
                "date": "2026-11-25",
            }
            | others
        ),
    )


def test_the_cache_lists_and_clears_them(printed: Run) -> None:
    for line in ("cache --clear models", "tune --clear"):
        write()
        said = "settings of optimize that mlx-marlin tune found"
        assert said in printed("cache")
        printed(line)
        assert kept() is None


def test_doctor_tells_the_settings_and_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def doctor(*options: str) -> str:
        main(["doctor", *options])  # here is no Metal: its status is that of a problem
        return capsys.readouterr().out

    file = write()
    export = f"export {VARIABLE}=200 before MLX starts"

    out = doctor()
    line = "tiny: join, measured here on 2026-11-25: 1.25 times stock MLX at 1 streams"
    assert line in out
    assert export in out
    (found,) = json.loads(doctor("--json"))["models"]["models"]
    assert found["max_ops_per_buffer"] == 200
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "200")
        assert export not in doctor()
    with monkeypatch.context() as patch:
        patch.setenv(tuned_results.ENVIRONMENT, "0")
        out = doctor()
    assert export not in out
    assert out.count("switched off by MLX_MARLIN_TUNED=0") == 2
    file.write_text("{")
    assert f"the measured settings in {file} are ignored" in doctor()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Lists the variable when mlx-lm's `generate`, which does nothing, begins."""
    found: list[str | None] = []
    generate = sys.modules["mlx_lm.generate"]
    monkeypatch.setattr(generate, "main", lambda: found.append(os.getenv(VARIABLE)))
    monkeypatch.setattr("mlx_marlin.lm.auto.hook.install", lambda *_: True)
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
    (other / "config.json").write_text("{}")
    assert variable(arguments=["--model", str(other)]) is None
    assert variable("--join") is None
    for name in (*environment.CHOICES, tuned_results.ENVIRONMENT):
        with monkeypatch.context() as patch:
            patch.setenv(name, "0")
            assert variable() is None
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "77")
        assert main(["lm", "generate", *model]) == 0
        assert called[-1] == "77"
    for others in ({"max_ops_per_buffer": None}, {"config": "another"}):
        write(folder, **others)
        assert variable() is None
    write(folder)
    old = replace(machine.here(), mlx="0.1.2")
    monkeypatch.setattr(machine, "here", lambda: old)
    with pytest.warns(RuntimeWarning, match="measured with mlx "):
        assert variable() is None


def test_lm_warns_about_the_model_that_it_runs_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine.here()
    old = replace(here, mlx="0.1.2")
    monkeypatch.setattr(machine, "here", lambda: old)
    write(config="another", key="1")
    write(folder, key="2", max_ops_per_buffer=100)
    monkeypatch.setattr(machine, "here", lambda: here)
    file = write(folder, key="3")
    file.with_name(f"{here.slug}-4.json").write_text("{")

    environment.set_for_model(["--model", str(folder)])

    assert os.environ.pop(VARIABLE) == "200"
    file.unlink()
    with pytest.warns(RuntimeWarning, match="-2.json are ignored: measured") as caught:
        environment.set_for_model(["--model", str(folder)])
    assert len(caught) == 1
    assert VARIABLE not in os.environ


def test_a_model_of_the_hub_is_found_where_it_was_downloaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    place = str(folder / "config.json")
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda name, file: place if (name, file) == ("a/b", "config.json") else None,
    )

    expected = model_key.key_of_model_name(str(folder))
    assert expected is not None
    assert model_key.key_of_model_name("a/b") == expected
    assert model_key.key_of_model_name("a/c") is None


def test_the_variable_is_set_before_mlx_is_imported(folder: Path, root: Path) -> None:
    write(folder)
    code = f"""
import os, sys
from pathlib import Path
from mlx_marlin import cache
cache.root = lambda: Path({str(root)!r})
from mlx_marlin.cli import lm
from mlx_marlin.lm.tuned_models import environment
environment.set_for_model(["--model", {str(folder)!r}])
print(os.environ[{VARIABLE!r}], [name for name in sys.modules if name == "mlx.core"])
"""
    done = run_python(code)
    assert done.stdout == "200 []\n", done.stderr


def test_the_config_of_a_model_is_kept(
    folder: Path, speeds: Speeds, printed: Run
) -> None:
    printed("tune", folder)

    assert verdict().model == "quantized"
    assert verdict().config == model_key.key_of_model_name(str(folder)) != ""
