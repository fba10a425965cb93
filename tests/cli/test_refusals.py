"""What a command cannot do is one line, before anything is loaded or measured."""

import os
from pathlib import Path

import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest

from cli.conftest import Run
from mlx_marlin.backends import planner
from mlx_marlin.cli.main import main
from mlx_marlin.measure import products, tuner
from support.marks import needs_emulator
from support.models import Layers
from support.quantized_folder import MODEL

NO_FOLDER = "the folder none does not exist, expected a file in an existing folder"
NO_PICTURE = "expected a name that ends in .svg or .png"
NO_SHAPE = "expected MxNxK such as 8x4096x4096"
REFUSED = {
    "plan": [
        ("0 64 64", "m=0"),
        ("8 64 100", "k=100 is not a multiple of group_size=64"),
        ("8 64 64 --batch 0", "batch=0 must be at least 1"),
        ("8 64 64 --group-size 48", "group_size=48"),
        ("8 64 64 --bits 7", "mode='affine' with bits=7 is not one of affine 1-bit"),
        ("8 64 64 --mode mxfp4 --bits 8", "mode='mxfp4' with bits=8 is not one"),
        ("8 64 64 --mode mxfp4 --group-size 64", "group_size=64 is not one of (32,)"),
        ("8 64 32 --mode nvfp4", "k=32 is not a multiple of 64, which nvfp4 with grou"),
        ("8 64 64 --mode symmetric", "layout='mlx' is not one of ('marlin',)"),
        ("8 64 64 --chip Quartz", "device 'Quartz' is not one of: Apple M1"),
        ("8 64 64 --cores 0", "cores=0, expected 1 to 1024"),
        ("8 64 64 --cores 1000000000", "cores=1000000000, expected 1 to 1024"),
        ("8 64 64 --chip H200 --cores -3", "multiprocessors=-3, expected 1 to 1024"),
        ("8 64 64 --threadgroups 1000000000", "1000000000 is not between 1 and 65535"),
        (
            "8 64 64 --chip H200 --json --threadgroups 1000000000",
            "threadgroups=1000000000 is not between 1 and 65535",
        ),
        ("8 64 64 --kernel gemv", "at most 5 rows"),
        ("8 64 64 --k-parallel 9", "k_parallel=9"),
        ("8 64 64 --json --threadgroups 0", "num_threadgroups=0"),
        ("8 64 64 --strategy stripe --minimum 2", "stripe does not take minimum=2"),
        ("8 64 64 --strategy hybrid --whole 9", "whole=9 is not between"),
        ("8 64 64 --minimum 1 --k-parallel 1", "no strategy takes all of"),
        ("8 64 64 --simdgroups-k 9", "simdgroups_k=9"),
        ("8 64 64 --reduction atomic", "reduction='atomic' fits none"),
        *((words, NO_SHAPE) for words in ("8x64", "8 64", "8 64 x", "8x64x128 3")),
        ("1.5x64x64", NO_SHAPE),
    ],
    "profile": [
        ("--single-config 1,2", "--single-config '1,2', expected MxNxK such as"),
        ("--single-config=-1,64,64", "--single-config '-1,64,64', expected MxNxK"),
        ("--single-config 0,64,128", "at least 1, got m=0, n=64, k=128"),
        ("--single-config 1,64,100", "k=100 is not a multiple of group_size=128"),
        ("--single-config 1,64,64 --bits 7", "mode='symmetric' with bits=7 is not one"),
        ("--single-config 1,64,64 --group-size 48", "group_size=48 is not one of"),
        ("--single-config 1,64,64 --layout mlx", "layout='mlx' is not one of ('marli"),
        ("--assume-ms 1", "--assume-ms 1 is the time of one product"),
        ("--single-config 1,64,64 --all-kernels --assume-ms 1", "and no --all-kernels"),
        *(
            (
                f"--single-config 1,64,64 --assume-ms {milliseconds}",
                f"--assume-ms {milliseconds}, expected 1e-09 to ",
            )
            for milliseconds in ("0", "-1", "nan", "inf")
        ),
        ("--single-config 1,64,64 --chip M99", "device 'M99' is not one of"),
        ("--model a --bits 3", "--bits 3 is not for a model: 'a' has its"),
        ("--json none/a.json", NO_FOLDER),
        ("--export-json .", "--json .: is a folder, expected a file"),
        ("--single-config 1,64,128 --kernel mma --chip M4", "'mma' is not one of Meta"),
        ("--single-config 1,64,128 --plot a.pdf", f"--plot a.pdf: {NO_PICTURE}"),
    ],
    "report": [
        ("a/model --rows 1,x", "--rows '1,x', expected numbers"),
        ("a/model --rows 0", "--rows '0', expected numbers"),
        ("a/model --chip M77", "device 'M77' is not one of"),
        ("a/model --json none/report.json", NO_FOLDER),
    ],
    "verify": [
        ("MODEL --rows 0", "--rows '0', expected numbers such as 1,2,4,8"),
        ("MODEL --rows 5000", "rows=[5000], expected integers from 1 to 4096"),
        ("MODEL --seed -1", "seed=-1, expected an integer from 0"),
        ("MODEL --text none.txt", "none.txt"),
        ("MODEL --text odd.npy", "odd.npy: byte 1 is not UTF-8"),
        ("MODEL --against none", "none: no such folder"),
        ("MODEL --json none/report.json", NO_FOLDER),
        ("model.gguf --apply", "model.gguf is a GGUF file"),
    ],
    "convert MODEL": [
        ("out --layout other", "layout='other', expected one of ['marlin', 'mlx']"),
        ("out --only (", "only='(' is not a pattern"),
        ("out --group-size x", "--group-size 'x', expected a number or channel"),
        ("out --mode affine --group-size 96", "group_size=96"),
        ("out --bits 9", "bits=9"),
        ("out --bits 4 --embedding-bits 9", "embedding_bits=9, expected one of (0, 1,"),
        ("out --quantizer best", "quantizer='best', expected one of"),
        ("folder.svg", "folder.svg exists, expected the name of a new folder"),
    ],
    "convert a/model": [
        ("out --layout other", "layout='other', expected one of ['marlin', 'mlx']"),
        ("out --only (", "only='(' is not a pattern"),
        ("out --group-size x", "--group-size 'x', expected a number or channel"),
        ("out --requantize 9", "bits=9"),
        ("folder.svg", "folder.svg exists, expected the name of a new folder"),
    ],
    "lm --lookup": [("evaluate --model a/model", "--lookup evaluate, expected one of")],
    "lm --heads auto": [
        ("evaluate --model a/model", "--heads evaluate, expected one of"),
        ("chat --model a/model --draft-model b", "--heads and --draft-model exclude"),
        ("chat --model nowhere --prompt=--draft-model", "nowhere: no such folder"),
    ],
    "doctor": [
        ("--rows 1,4", "--rows 1,4 requires --check"),
        ("--model some/model", "--model some/model requires --check"),
        ("--check --rows 1,x", "--rows '1,x', expected numbers such as 1,2,4,8"),
        ("--check --model a/model --rows 0", "--rows '0', expected numbers such as"),
    ],
    "demo": [
        ("--batch 1000000000", "--batch 1000000000, expected 1 to 1024"),
        ("--batch 4 0", "--batch 0, expected 1 to 1024"),
        ("--batch 4 -1", "--batch -1, expected 1 to 1024"),
        ("--tokens 1000000000", "--tokens 1000000000, expected 3 to 4096"),
        ("--tokens 1", "--tokens 1, expected 3 to 4096"),
        ("--model a/model --tokens 1", "--tokens 1, expected 3 to 4096"),
    ],
    "render": [
        ("none.json -o a.html", "error: none.json: No such file"),
        ("odd.npy -o a.pdf", "expected a name that ends in .html, .svg or .png"),
        ("odd.npy -o none/a.html", NO_FOLDER),
        ("odd.npy -o folder.svg", "is a folder, expected a file"),
    ],
    "emulate": [("none.metal --grid 1", "error: none.metal: No such file")],
    "emulate kernel.metal": [
        ("--grid 1000000000000", "--grid 1000000000000, expected an integer of 32"),
        ("--grid 100000,100000", "--grid 100000,100000 has 10000000000 threads, exp"),
        ("--grid ²", "--grid '²', expected one to three numbers"),
        ("--grid 4 --threadgroup 1e3", "--threadgroup '1e3', expected one to three"),
        ("--grid 4 --input x=none.npy", "--input 'none.npy', expected a .npy file"),
        ("--grid 4 --input x=odd.npy", "--input 'odd.npy', expected a .npy file"),
        ("--grid 4 --input x=short.npy", "--input 'short.npy', expected a .npy file"),
        ("--grid 4 --input x=99999999999999999999", "expected an integer of 64 bits"),
        ("--grid 4 --input x=4:float32 --input x=1", "x is given twice, expected once"),
        (
            "--grid 4 --output y=100000x100000:float32",
            "--output '100000x100000:float32' has 10000000000 elements, expected at",
        ),
        ("--grid 4 --template N=9999999999", "--template N 9999999999, expected an"),
        ("--grid 4 --input x=zip.npy", "--input 'zip.npy', expected a .npy file"),
        ("--grid 4 --input x=npz.npy", "--input 'npz.npy', expected a .npy file"),
        ("--grid 4 --input x=head.npy", "--input 'head.npy', expected a .npy file"),
        ("--grid 4 --header odd.npy", "odd.npy: byte 1 is not UTF-8, expected a text"),
    ],
}
"""Words of a command, and what is said of them."""
NOT_MEASURED = {
    "bench": [
        ("a/model", "'a/model' is not a shape such as 8x4096x11008"),
        ("0x64x256", "m=0"),
        ("4x64x256 --rows 0", "--rows '0'"),
        ("4x64x256 --seconds nan", "--seconds nan"),
        ("4x64x256 --seconds 1e9", "--seconds 1000000000"),
        ("--model x --rows 0", "--rows '0'"),
        ("--model x --streams 1,x", "--streams '1,x'"),
        ("--model x --streams 9999", "--streams 9999"),
        ("--model x --prompt 0", "--prompt 0"),
        ("--model x --new 3", "--new 3"),
        ("4x64x256 --json none/x", NO_FOLDER),
        ("4x64x250", "k=250"),
        ("4x64x256 --group-size 256", "group_size=256"),
    ],
    "tune": [
        ("", "expected a shape such as 8x4096x11008, a model, or"),
        ("4x64xy", "is neither a shape such as 8x4096x11008 nor a model: 4x64xy: no s"),
        ("4x64x250", "k=250 is not a multiple of group_size=64"),
        ("4x64x256 --rows 1,0", "--rows '1,0', expected numbers such as 1,2,4"),
        ("4x64x256 --rows 1,", "--rows '1,', expected numbers such as 1,2,4"),
        ("4x64x256 --seconds 0", "--seconds 0, expected 1e-09 to 86400"),
        ("4x64x256 --seconds inf", "--seconds inf, expected 1e-09 to 86400"),
        ("--clear --dry-run", "--clear and --dry-run exclude each other"),
        ("--clear --json", "--json writes times of products"),
        ("4x64x256 --dry-run --json", "--json writes times of products"),
        ("4x64x256 --group-size 48", "group_size=48 is not one of"),
        ("1x64x128 --group-size 16", "group_size=16 is not one of (32, 64, 128)"),
        ("4x64x256 --group-size 256 --layout marlin", "plans are compared with stock"),
        ("a/model --group-size 64", "--group-size 64 is not for a model"),
        ("a/model --mode mxfp4", "--mode mxfp4 is not for a model"),
        ("a/model --bits 4", "--bits 4 is not for a model"),
        ("a/model --rows 0", "--rows '0'"),
        ("a/model --streams 0", "--streams '0'"),
        ("a/model --streams 1,65", "--streams 65"),
        ("a/model --max-minutes 0", "--max-minutes 0"),
        ("4x64x256 --mode mxfp4 --bits 8", "bits=8 is not one of affine"),
        ("4x64x256 --mode symmetric --layout mlx", "layout='mlx' is not one of ('marl"),
    ],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the current folder, with files that are wrong in one way each."""
    folder = tmp_path / "here"
    (folder / "folder.svg").mkdir(parents=True)
    monkeypatch.chdir(folder)
    Path("model.gguf").touch()
    Path("kernel.metal").write_text("y[0] = 1;")
    Path("odd.npy").write_bytes(b"x\xff")
    np.save("short.npy", np.zeros(8))
    os.truncate("short.npy", Path("short.npy").stat().st_size - 1)
    Path("zip.npy").write_bytes(b"PK\x03\x04garbage")
    np.savez("npz.npz", np.zeros(8))
    os.replace("npz.npz", "npz.npy")
    Path("head.npy").write_bytes(b"\x93NUMPY\x01\x00\x04\x00{'(\n")
    for owner, name in ((products, "measure"), (tuner, "tune"), (mlx_lm, "load")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("begun"))
    return folder


def assert_refused(refused: Run, folder: Path, line: str, said: str) -> None:
    """Checks what is said, and that no file is written."""
    before = sorted(folder.rglob("*"))

    assert said in refused(line.replace("MODEL", str(MODEL)))
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "said"),
    [(f"{name} {words}", said) for name in REFUSED for words, said in REFUSED[name]],
)
def test_what_cannot_be_done_is_one_line(
    line: str, said: str, folder: Path, refused: Run
) -> None:
    assert_refused(refused, folder, line, said)


@pytest.mark.parametrize("option", ["--save", "--plot"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, NO_PICTURE) for name in ("a.pdf", "plan", "a.svg.gz")),
        ("none/a.svg", NO_FOLDER),
        ("folder.svg", "is a folder, expected a file"),
    ],
)
def test_where_nothing_can_be_saved_nothing_is_planned(
    option: str,
    name: str,
    said: str,
    folder: Path,
    refused: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "compare", None)
    line = f"plan 8x64x64 {option} {name}"

    assert_refused(refused, folder, line, f"{option} {name}: {said}")


@needs_emulator
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{name} {words}", said)
        for name in NOT_MEASURED
        for words, said in NOT_MEASURED[name]
    ],
)
def test_what_cannot_be_measured_is_one_line(
    line: str, said: str, folder: Path, kept: Path, refused: Run
) -> None:
    assert_refused(refused, folder, line, said)
    assert not kept.exists()


@needs_emulator
@pytest.mark.parametrize(
    "line", ["bench --model a/b", "tune a/b", "doctor --check --model a/b"]
)
def test_a_model_without_quantized_layers_is_refused(
    line: str,
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Layers(nn.Linear(8, 8))
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: (model, None))

    assert main(line.split()) == 2
    said = "'a/b' has no quantized linear layer in a format that"
    assert said in capsys.readouterr().err
