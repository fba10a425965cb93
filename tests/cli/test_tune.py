"""`mlx-marlin tune` measures, keeps what it finds, and what it keeps is used."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache as cached
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest

import mlx_marlin
from mlx_marlin import cache, emulator, guard, state
from mlx_marlin.backends import (
    devices,
    launch,
    planner,
    selection,
    tuned_results,
)
from mlx_marlin.backends.cuda.device import CudaDevice
from mlx_marlin.cli import main
from mlx_marlin.planning.measurement import Result
from mlx_marlin.planning.problem import Problem
from mlx_marlin.tuning import counting, operands, tuner
from support.arguments import activations, weight
from support.models import Layers, tiny_llama

pytestmark = pytest.mark.skipif(
    emulator.unavailable() is not None, reason="no compiler for Metal kernels"
)

Choose = Callable[[str | None], None]
PROBLEM = Problem(m=4, n=64, k=256)
HALF = {"dtype": mx.float16}


@pytest.fixture
def kept(backend: Choose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Runs kernels in the emulator and keeps results in a folder of the test."""
    compiled = cache.folder("emulator")
    monkeypatch.setattr(
        cache, "folder", lambda name: {"emulator": compiled}.get(name, tmp_path / name)
    )
    monkeypatch.delenv(tuned_results.ENVIRONMENT)
    backend("emulator")
    return tmp_path / "tuned"


@pytest.fixture
def longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the emulator's clock run backwards: another plan than the model's wins."""
    honest = counting.counted_seconds
    monkeypatch.setattr(
        counting, "counted_seconds", lambda *arguments: 1e-6 / honest(*arguments) * 1e-6
    )


def results(kept: Path) -> dict[Problem, Result]:
    return tuned_results.read(
        kept, tuned_results.machine(devices.current(), "emulator")
    )


def without_dates(kept: Path) -> Any:
    (file,) = kept.glob("*.json")
    data = json.loads(file.read_text())
    for row in data["results"]:
        assert len(row.pop("date")) == len("2026-11-20")
    return data


def test_a_shape_is_tuned_kept_and_used(
    kept: Path, longest_first: None, capsys: pytest.CaptureFixture[str]
) -> None:
    x, native = activations(4, 256, **HALF), weight(64, 256, **HALF)
    before = mlx_marlin.quantized_matmul(x, *native)

    assert main(["tune", "4x64x256"]) == 0

    (result,) = results(kept).values()
    assert result.plan.problem == PROBLEM
    assert result.plan != planner.choose(PROBLEM, devices.current())
    assert result.clock == "emulator counters"
    assert "us (emulator counters)" in capsys.readouterr().out
    after = mlx_marlin.quantized_matmul(x, *native)
    assert launch.plans_built() == [result.plan]
    assert mx.allclose(before, after, atol=1e-2).item()


def test_another_process_uses_what_was_kept(kept: Path, longest_first: None) -> None:
    main(["tune", "4x64x256"])
    (result,) = results(kept).values()
    program = f"""
from pathlib import Path
import mlx.core as mx
from mlx_marlin import cache, quantized_matmul
from mlx_marlin.backends import launch
cache.folder = lambda name: {{"tuned": Path({str(kept)!r})}}[name]
launch.product = lambda plan: print(plan.explain()) or (lambda x, *_: mx.zeros((4, 64)))
w = mx.quantize(mx.zeros((64, 256), mx.float16), group_size=64, bits=4)
quantized_matmul(mx.zeros((4, 256), mx.float16), *w)
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )

    assert answer.stdout.strip() == result.plan.explain(), answer.stderr


def test_counters_give_the_same_file_every_time(kept: Path) -> None:
    shapes = ["4x64x256", "8,96,512"]
    main(["tune", *shapes])
    first = without_dates(kept)

    main(["tune", *reversed(shapes)])

    assert without_dates(kept) == first
    assert [row["problem"]["m"] for row in first["results"]] == [4, 8]
    assert first["machine"]["chip"].startswith("emulator for")


def test_a_wrong_plan_is_told_and_not_kept(
    kept: Path,
    longest_first: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = launch.product

    def product(plan: Any) -> launch.Product:
        run = right(plan)
        return (lambda *given: run(*given) * 2) if plan.is_split else run

    monkeypatch.setattr(launch, "product", product)

    assert main(["tune", "4x64x256"]) == 1

    (result,) = results(kept).values()
    assert not result.plan.is_split
    assert "WRONG product, never used" in capsys.readouterr().out


def test_without_a_right_plan_nothing_is_kept(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = launch.product
    monkeypatch.setattr(
        launch, "product", lambda plan: lambda *given: right(plan)(*given) + 1
    )

    assert main(["tune", "4x64x256"]) == 1

    assert results(kept) == {}
    printed = capsys.readouterr().out
    assert "all our plans of 1 of 1 problems failed" in printed
    assert "nothing was kept" in printed
    assert "kept in" not in printed


def test_plans_that_were_wrong_are_not_served_either(
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(guard.ENVIRONMENT, "1")
    right = launch.product  # which the guard's check does not call
    monkeypatch.setattr(
        launch, "product", lambda plan: lambda *given: right(plan)(*given) + 1
    )

    with pytest.warns(RuntimeWarning, match="wrong in tuning"):
        assert main(["tune", "4x64x256"]) == 1

    assert "stock MLX serves them" in capsys.readouterr().out
    x, w = mx.ones((4, 256), mx.float16), mx.quantize(mx.ones((64, 256), mx.float16))
    with pytest.warns(RuntimeWarning, match="wrong in tuning"):
        assert "wrong in tuning" in str(mlx_marlin.why_not(x, *w))

    # All of them are known now, so none is measured again.
    with pytest.warns(RuntimeWarning, match="wrong in tuning"):
        assert main(["tune", "4x64x256"]) == 1
    assert "a kernel failed its check, never used" in capsys.readouterr().out


def measured_problems(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Stands in for measuring, and lists what would be measured."""
    seen: list[Problem] = []

    def tune(problem: Problem, *_: Any) -> tuner.Outcome:
        seen.append(problem)
        spread = tuner.Spread(median=1e-6)
        plan = planner.choose(problem, devices.current())
        return tuner.Outcome(arms={plan: spread}, wrong=(), result=None)

    monkeypatch.setattr(tuner, "tune", tune)
    return seen


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["9x64x256"], [9]),
        (["9,64,256"], [9]),
        (["64x256"], [1, 2, 4, 8, 16, 32]),
        (["64x256", "--rows", "3,1"], [3, 1]),
        (["9x64x256", "--rows", "3,1"], [3, 1]),
        (["9x64x256", "9,64,256", "64x256", "--rows", "2"], [2]),
    ],
)
def test_shapes_and_rows_say_what_is_measured(
    kept: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], rows: list[int]
) -> None:
    seen = measured_problems(monkeypatch)

    assert main(["tune", *words]) == 0

    assert [each.m for each in seen] == rows
    assert {(each.n, each.k) for each in seen} == {(64, 256)}


def test_options_describe_the_shape(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = measured_problems(monkeypatch)
    options = "--dtype bfloat16 --group-size 32 --layout marlin"

    main(["tune", "4x64x256", *options.split()])

    expected = Problem(
        m=4,
        n=64,
        k=256,
        dtype="bfloat16",
        scale_dtype="bfloat16",
        group_size=32,
        layout="marlin",
    )
    assert seen == [expected]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--mode mxfp8", [("mxfp8", 8, 32, "mlx")]),
        ("--bits 3 --layout marlin", [("affine", 3, 64, "marlin")]),
        ("--mode symmetric --bits 6", [("symmetric", 6, 64, "marlin")]),
        (
            "--mode nvfp4 --layout both",
            [("nvfp4", 4, 16, "mlx"), ("nvfp4", 4, 16, "marlin")],
        ),
        ("--mode zero_point --layout both", [("zero_point", 4, 64, "marlin")]),
    ],
)
def test_every_format_and_layout_can_be_measured(
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    expected: list[tuple[str, int, int, str]],
) -> None:
    seen = measured_problems(monkeypatch)

    assert main(["tune", "4x64x256", *options.split()]) == 0

    found = [(each.mode, each.bits, each.group_size, each.layout) for each in seen]
    assert found == expected


@pytest.mark.thinned(1)
@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_a_format_of_floats_is_tuned_kept_and_used(
    kept: Path, longest_first: None, mode: str
) -> None:
    x = activations(4, 256, **HALF)
    native = mx.quantize(mx.random.normal((64, 256)), mode=mode)
    before = mlx_marlin.quantized_matmul(x, *native, mode=mode)

    assert main(["tune", "4x64x256", "--mode", mode]) == 0

    (result,) = results(kept).values()
    assert result.plan.problem.mode == mode
    state.reset()
    after = mlx_marlin.quantized_matmul(x, *native, mode=mode)
    assert launch.plans_built() == [result.plan]
    assert mx.allclose(before, after, rtol=1e-2, atol=1e-1).item()


def test_a_models_layers_are_measured(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = measured_problems(monkeypatch)
    asked: list[tuple[str, bool]] = []

    def load(name: str, *, lazy: bool) -> tuple[nn.Module, None]:
        asked.append((name, lazy))
        model = tiny_llama(tied=False)
        model.extra = nn.QuantizedLinear(64, 64, mode="mxfp4")
        model.odd = nn.QuantizedLinear(96, 64, mode="nvfp4")
        return model, None

    monkeypatch.setattr(mlx_lm, "load", load)

    assert main(["tune", "some/model", "--rows", "1,8", "--dtype", "float16"]) == 0

    assert asked == [("some/model", True)]
    assert len(seen) == 12
    assert {each.m for each in seen} == {1, 8}
    assert {each.dtype for each in seen} == {"float16"}
    assert {each.mode for each in seen} == {"affine", "mxfp4"}
    assert {each.layout for each in seen} == {"mlx"}
    assert (
        "1 quantized layers are in formats that our kernels do not read"
        in capsys.readouterr().out
    )

    main(["tune", "some/model", "--rows", "1", "--layout", "both"])
    assert len(seen[12:]) == 12
    assert {each.layout for each in seen[12:]} == {"mlx", "marlin"}


def test_on_cuda_a_models_layers_are_measured_packed_but_a_tied_head(
    kept: Path, backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_h200(backend, monkeypatch)
    seen = measured_problems(monkeypatch)
    model = tiny_llama(tied=True)
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: (model, None))

    assert main(["tune", "a/model", "--rows", "1", "--dtype", "float16"]) == 0

    head = model.model.embed_tokens.scales.shape[0]
    layouts = {each.n: each.layout for each in seen}
    assert layouts.pop(head) == "mlx"
    assert {*layouts.values()} == {"marlin"}


def test_a_dry_run_lists_and_measures_nothing(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = measured_problems(monkeypatch)

    assert main(["tune", "4x64x256", "--dry-run"]) == 0

    said = capsys.readouterr().out
    for plan in tuner.arms(PROBLEM, devices.current(), times_stock=False):
        assert tuner.name(plan) in said
    assert "us by the model, not measured" in said
    assert (seen, kept.exists()) == ([], False)


def test_nothing_is_cleared_where_nothing_can_be_measured_then(
    kept: Path, backend: Choose, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["tune", "4x64x256"])
    backend("stock")

    assert main(["tune", "8x64x256", "--clear"]) == 2

    assert "there is nothing to tune" in capsys.readouterr().err
    backend("emulator")
    assert results(kept)


@pytest.mark.parametrize("on", ["metal", "cuda"])
def test_a_device_that_is_not_here_is_told_before_anything_is_done(
    on: str,
    kept: Path,
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if getattr(mx, on).is_available():
        pytest.skip(f"MLX has {on} here")
    main(["tune", "4x64x256"])
    seen = measured_problems(monkeypatch)
    backend(on)

    assert main(["tune", "4x64x256", "--clear"]) == 2

    said = capsys.readouterr().err
    assert f"MLX_MARLIN_BACKEND={on!r} needs a " in said
    assert "and MLX has none here: expected emulator, stock, or no value" in said
    assert (seen, len(results(kept))) == ([], 1)
    assert main(["tune", "4x64x256", "--dry-run"]) == 0  # any machine may plan


def test_clearing_removes_what_was_kept(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["tune", "4x64x256"])
    assert results(kept)

    # Whatever chip is named.
    monkeypatch.setenv(devices.ENVIRONMENT, "H200")
    assert main(["tune", "--clear"]) == 0
    monkeypatch.delenv(devices.ENVIRONMENT)

    assert f"files removed from {kept}: 1" in capsys.readouterr().out
    assert results(kept) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected a shape such as 8x4096x11008, a model, or"),
        (["4x64x250"], "k=250 is not a multiple of group_size=64"),
        (["4x64x256", "--rows", "1,0"], "--rows '1,0', expected numbers such as 1,2,4"),
        (["4x64x256", "--rows", "1,"], "--rows '1,', expected numbers such as 1,2,4"),
        (["4x64x256", "--seconds", "0"], "--seconds 0 must be above 0"),
        (["4x64x256", "--seconds", "nan"], "--seconds nan must be above 0"),
        (["--clear", "--dry-run"], "--clear and --dry-run exclude each other"),
        (["4x64x256", "--group-size", "48"], "group_size=48 is not one of"),
        (
            ["4x64x256", "--group-size", "256", "--layout", "marlin"],
            "plans are compared with stock MLX",
        ),
        (["a/model", "--group-size", "64"], "--group-size 64 is for shapes"),
        (["a/model", "--mode", "mxfp4"], "--mode mxfp4 is for shapes"),
        (["a/model", "--bits", "4"], "--bits 4 is for shapes"),
        (["4x64x256", "--mode", "mxfp4", "--bits", "8"], "bits=8 is not one of affine"),
        (
            ["4x64x256", "--mode", "symmetric", "--layout", "mlx"],
            "layout='mlx' is not one of ('marlin',)",
        ),
    ],
)
def test_what_cannot_be_tuned_is_said(
    kept: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *words]) == 2
    assert said in capsys.readouterr().err
    assert not kept.exists()


def on_h200(
    backend: Choose, monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90"
) -> None:
    h200 = devices.named("NVIDIA H200")
    assert isinstance(h200, CudaDevice)
    here = replace(h200, arch=arch)
    backend("cuda")
    monkeypatch.setattr(devices, "current", lambda: here)
    monkeypatch.setattr(selection, "missing", lambda: None)


def test_what_no_plan_serves_is_said_and_left_out(
    kept: Path,
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_h200(backend, monkeypatch)
    seen = measured_problems(monkeypatch)
    # Where the back end is forced, plans serve any number of rows.
    assert main(["tune", "64x256", "--rows", "128,129"]) == 0
    assert [each.m for each in seen] == [128, 129]
    assert "not measured" not in capsys.readouterr().out

    monkeypatch.setattr(selection, "backend", cached(lambda: "cuda"))
    monkeypatch.setattr(selection, "forced_backend", cached(lambda: None))
    seen.clear()
    assert main(["tune", "64x256", "--rows", "128,129"]) == 0

    assert [(each.m, each.layout) for each in seen] == [(128, "marlin")]
    said = capsys.readouterr().out
    assert said.count("not measured") == 1
    assert "129 rows of 256→64" in said
    assert "129 rows are multiplied by the weight decoded once" in said


@pytest.mark.parametrize(
    ("arch", "words", "said"),
    [
        ("sm_90", ["--dtype", "float32"], "multiply float16 and bfloat16"),
        ("sm_75", [], "need compute capability 8.0"),
    ],
)
def test_what_no_cuda_kernel_multiplies_is_said_before_measuring(
    kept: Path,
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arch: str,
    words: list[str],
    said: str,
) -> None:
    on_h200(backend, monkeypatch, arch)
    seen = measured_problems(monkeypatch)

    assert main(["tune", "4x64x256", *words]) == 2

    found = capsys.readouterr().err
    assert "4 rows of 256→64" in found
    assert said in found
    assert (seen, kept.exists()) == ([], False)


def test_a_model_that_is_none_is_said(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str, **_: Any) -> None:
        raise OSError("no such repository")

    monkeypatch.setattr(mlx_lm, "load", load)
    assert main(["tune", "4x64xy"]) == 2
    said = capsys.readouterr().err
    assert "'4x64xy' is neither a shape such as 8x4096x11008 nor a model" in said
    assert "no such repository" in said

    monkeypatch.setattr(
        mlx_lm, "load", lambda *_, **__: (Layers(nn.Linear(8, 8)), None)
    )
    assert main(["tune", "a/model"]) == 2
    assert "has no quantized linear layer in a format that" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "words"), [("mlx_lm", ["a/model"]), ("tqdm", ["4x64x256"])]
)
def test_what_is_missing_is_named_with_its_extra(
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
    words: list[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)

    assert main(["tune", *words]) == 2

    assert "needs pip install 'mlx-marlin[lm]'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_told_before_measuring(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = measured_problems(monkeypatch)
    kept.write_text("a file where the folder should be")

    assert main(["tune", "4x64x256"]) == 2

    assert f"the results cannot be kept in {kept}: " in capsys.readouterr().err
    assert seen == []
    state.reset()
    assert mlx_marlin.why_not(activations(4, 256), *weight(64, 256)) is None


@pytest.mark.parametrize(
    ("on", "chip"), [("metal", "Apple M3 Max"), ("cuda", "NVIDIA H200")]
)
def test_on_a_gpu_the_whole_way_runs_by_the_wall_clock(
    on: str,
    chip: str,
    kept: Path,
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = devices.named(chip)
    backend(on)
    monkeypatch.setattr(devices, "current", lambda: here)
    monkeypatch.setattr(selection, "missing", lambda: None)
    monkeypatch.setattr(operands, "cache_bytes", lambda device: 2**15)
    # All arms are stock MLX, on the CPU: whoever wins, wins by luck or stays.
    monkeypatch.setattr(
        launch, "product", lambda plan: operands.stock_product(plan.problem)
    )

    words = ["tune", "4x64x256", "--seconds", "0.1", "--layout", "mlx"]
    assert main(words) == 0

    (result,) = tuned_results.read(kept, tuned_results.machine(here, on)).values()
    assert result.clock == "wall time"
    arms = tuner.arms(PROBLEM, here, times_stock=True)
    assert {*result.medians_us} == {*map(tuner.name, arms)}
    said = capsys.readouterr().out
    assert "+- half the interquartile range" in said
    assert all(tuner.name(arm) in said for arm in arms)
    assert str(kept) in said


def test_a_chip_that_is_only_named_is_not_measured(
    kept: Path,
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend("metal")
    monkeypatch.setenv(devices.ENVIRONMENT, "M3 Max")

    assert main(["tune", "4x64x256"]) == 2

    assert "MLX_MARLIN_DEVICE selects a device to plan for" in capsys.readouterr().err
