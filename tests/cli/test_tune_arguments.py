"""Arguments of `mlx-marlin tune`: what is measured, and what is refused before."""

import sys
from functools import cache as cached
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_marlin
from mlx_marlin import state
from mlx_marlin.backends import devices, selection
from mlx_marlin.cli.main import main
from mlx_marlin.measure import tuner
from mlx_marlin.planning.problem import Problem
from support.arguments import activations, weight
from support.choose import Choose
from support.marks import needs_emulator
from support.tune_commands import PROBLEM, measured_problems, on_h200, results

pytestmark = needs_emulator


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected a shape such as 8x4096x11008, a model, or"),
        (["4x64x250"], "k=250 is not a multiple of group_size=64"),
        (["4x64x256", "--rows", "1,0"], "--rows '1,0', expected numbers such as 1,2,4"),
        (["4x64x256", "--rows", "1,"], "--rows '1,', expected numbers such as 1,2,4"),
        (["4x64x256", "--seconds", "0"], "--seconds 0, expected 1e-09 to 86400"),
        (["4x64x256", "--seconds", "nan"], "--seconds nan, expected 1e-09 to 86400"),
        (["--clear", "--dry-run"], "--clear and --dry-run exclude each other"),
        (["4x64x256", "--group-size", "48"], "group_size=48 is not one of"),
        (
            ["4x64x256", "--group-size", "256", "--layout", "marlin"],
            "plans are compared with stock MLX",
        ),
        (["a/model", "--group-size", "64"], "--group-size 64 is not for a model"),
        (["a/model", "--mode", "mxfp4"], "--mode mxfp4 is not for a model"),
        (["a/model", "--bits", "4"], "--bits 4 is not for a model"),
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
