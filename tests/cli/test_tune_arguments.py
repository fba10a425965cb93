"""Arguments of `mlx-marlin tune`: what is measured, and what is refused before."""

from functools import cache as cached
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest

import mlx_marlin
from cli.conftest import Run
from mlx_marlin import state
from mlx_marlin.backends import devices, selection
from mlx_marlin.measure import tuner
from mlx_marlin.planning.problem import Problem, problem_of
from support.arguments import activations, weight
from support.choose import Choose
from support.marks import needs_emulator
from support.models import tiny_llama
from support.tune_commands import PROBLEM, on_h200

pytestmark = needs_emulator


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("9x64x256", [9]),
        ("9,64,256", [9]),
        ("64x256", [1, 2, 4, 8, 16, 32]),
        ("64x256 --rows 3,1", [3, 1]),
        ("9x64x256 --rows 3,1", [3, 1]),
        ("9x64x256 9,64,256 64x256 --rows 2", [2]),
    ],
)
def test_shapes_and_rows_say_what_is_measured(
    kept: Path, tuned: list[Problem], printed: Run, words: str, rows: list[int]
) -> None:
    printed(f"tune {words}")

    assert [each.m for each in tuned] == rows
    assert {(each.n, each.k) for each in tuned} == {(64, 256)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            "--dtype bfloat16 --group-size 32 --layout marlin",
            [{"dtype": "bfloat16", "group_size": 32, "layout": "marlin"}],
        ),
        ("--mode mxfp8", [{"mode": "mxfp8"}]),
        ("--bits 3 --layout marlin", [{"bits": 3, "layout": "marlin"}]),
        (
            "--mode symmetric --bits 6",
            [{"mode": "symmetric", "bits": 6, "group_size": 64, "layout": "marlin"}],
        ),
        (
            "--mode nvfp4 --layout both",
            [{"mode": "nvfp4", "layout": layout} for layout in ("mlx", "marlin")],
        ),
        (
            "--mode zero_point --layout both",
            [{"mode": "zero_point", "group_size": 64, "layout": "marlin"}],
        ),
    ],
)
def test_every_format_and_layout_can_be_measured(
    kept: Path,
    tuned: list[Problem],
    printed: Run,
    options: str,
    expected: list[dict[str, Any]],
) -> None:
    printed(f"tune 4x64x256 {options}")

    assert tuned == [problem_of(4, 64, 256, **each) for each in expected]


def test_a_dry_run_lists_and_measures_nothing(
    kept: Path, tuned: list[Problem], printed: Run
) -> None:
    said = printed("tune 4x64x256 --dry-run")

    for plan in tuner.arms(PROBLEM, devices.current(), times_stock=False):
        assert tuner.name(plan) in said
    assert "us by the model, not measured" in said
    assert (tuned, kept.exists()) == ([], False)


@pytest.mark.parametrize("on", ["stock", "metal", "cuda"])
def test_where_nothing_can_be_measured_nothing_is_done_before_it_is_told(
    on: str, kept: Path, backend: Choose, printed: Run, refused: Run
) -> None:
    if on != "stock" and getattr(mx, on).is_available():
        pytest.skip(f"MLX has {on} here")
    kept.mkdir(mode=0o700)
    (kept / "a.json").write_text("kept")
    backend(on)

    said = refused("tune 4x64x256 --clear")

    if on == "stock":
        assert "stock MLX serves every call, because MLX_MARLIN_BACKEND=" in said
    else:
        assert f"MLX_MARLIN_BACKEND={on!r} needs a " in said
        assert "and MLX has none here: expected emulator, stock, or no value" in said
        printed("tune 4x64x256 --dry-run")  # any machine may plan
    assert [path.name for path in kept.iterdir()] == ["a.json"]


def test_what_no_plan_serves_is_said_and_left_out(
    kept: Path,
    backend: Choose,
    tuned: list[Problem],
    printed: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_h200(backend, monkeypatch)
    # Where the back end is forced, plans serve any number of rows.
    assert "not measured" not in printed("tune 4096x4096 --rows 64,4096")
    assert [each.m for each in tuned] == [64, 4096]

    monkeypatch.setattr(selection, "backend", cached(lambda: "cuda"))
    monkeypatch.setattr(selection, "forced_backend", cached(lambda: None))
    tuned.clear()
    said = printed("tune 4096x4096 --rows 64,4096")

    assert [(each.m, each.layout) for each in tuned] == [(64, "marlin")]
    assert said.count("not measured") == 1
    assert "4096 rows of 4096→4096" in said
    assert "4096 rows are multiplied by the weight decoded once" in said


@pytest.mark.parametrize(
    ("arch", "words", "said"),
    [
        ("sm_90", "--dtype float32", "multiply float16 and bfloat16"),
        ("sm_75", "", "need compute capability 8.0"),
    ],
)
def test_what_no_cuda_kernel_multiplies_is_said_before_measuring(
    kept: Path,
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    tuned: list[Problem],
    refused: Run,
    arch: str,
    words: str,
    said: str,
) -> None:
    on_h200(backend, monkeypatch, arch)

    found = refused(f"tune 4x64x256 {words}")

    assert "4 rows of 256→64" in found
    assert said in found
    assert (tuned, kept.exists()) == ([], False)


def test_a_folder_that_cannot_be_written_to_is_told_before_measuring(
    kept: Path, tuned: list[Problem], refused: Run
) -> None:
    kept.write_text("a file where the folder should be")

    said = f"the results cannot be kept in {kept}: "
    assert said in refused("tune 4x64x256")
    assert tuned == []
    state.reset()
    assert mlx_marlin.why_not(activations(4, 256), *weight(64, 256)) is None


@pytest.mark.parametrize("command", ["tune", "bench"])
def test_a_chip_that_is_only_named_is_not_measured(
    command: str,
    kept: Path,
    backend: Choose,
    monkeypatch: pytest.MonkeyPatch,
    refused: Run,
) -> None:
    backend("metal")
    monkeypatch.setattr(selection, "missing", lambda: None)
    monkeypatch.setenv(devices.ENVIRONMENT, "M3 Max")

    said = "MLX_MARLIN_DEVICE selects a device to plan for"
    assert said in refused(f"{command} 4x64x256")


def test_a_models_layers_are_measured(
    kept: Path, tuned: list[Problem], printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def load(name: str, *, lazy: bool) -> tuple[nn.Module, None]:
        asked.append((name, lazy))
        model = tiny_llama(tied=False)
        model.extra = nn.QuantizedLinear(64, 64, mode="mxfp4")
        model.odd = nn.QuantizedLinear(96, 64, mode="nvfp4")
        return model, None

    monkeypatch.setattr(mlx_lm, "load", load)

    said = printed("tune some/model --rows 1,8 --dtype float16")

    assert asked == [("some/model", True)]
    assert len(tuned) == 12
    assert {each.m for each in tuned} == {1, 8}
    assert {each.dtype for each in tuned} == {"float16"}
    assert {each.mode for each in tuned} == {"affine", "mxfp4"}
    assert {each.layout for each in tuned} == {"mlx"}
    assert "1 quantized layers are in formats that our kernels do not read" in said

    printed("tune some/model --rows 1 --layout both")
    assert len(tuned[12:]) == 12
    assert {each.layout for each in tuned[12:]} == {"mlx", "marlin"}


def test_on_cuda_a_models_layers_are_measured_packed_but_a_tied_head(
    kept: Path,
    backend: Choose,
    tuned: list[Problem],
    printed: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_h200(backend, monkeypatch)
    model = tiny_llama(tied=True)
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: (model, None))

    printed("tune a/model --rows 1 --dtype float16")

    head = model.model.embed_tokens.scales.shape[0]
    layouts = {each.n: each.layout for each in tuned}
    assert layouts.pop(head) == "mlx"
    assert {*layouts.values()} == {"marlin"}
