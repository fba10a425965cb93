"""`mlx-marlin bench` from its arguments to its files; without a GPU all is marked."""

import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from tqdm import tqdm

from cli.conftest import Run
from mlx_marlin.backends import devices, graph, selection
from mlx_marlin.cli import bench
from mlx_marlin.cli.main import main
from mlx_marlin.lm import generation
from mlx_marlin.measure import operands, products, result_file, timing
from mlx_marlin.measure.rows import (
    CHAIN,
    CLOCKS,
    OURS,
    STOCK,
    STOCK_MODEL,
    GenerationRow,
)
from support.benchmark_rows import FACTS, mac_file, measured
from support.choose import Choose
from support.marks import needs_emulator
from support.models import tiny_llama
from support.recorder import Terminal

pytestmark = needs_emulator


@pytest.fixture
def on_metal(backend: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that there is a GPU, where stock MLX's product stands in for ours."""
    backend("metal")
    monkeypatch.setattr(selection, "missing", lambda: None)
    monkeypatch.setattr(devices, "current", lambda *_: devices.named("Apple M3 Max"))
    monkeypatch.setattr(operands, "MOST_WEIGHTS", 4)
    monkeypatch.setattr(timing, "LONGEST", 4)
    monkeypatch.setattr(
        graph, "product", lambda plan: operands.stock_product(plan.problem)
    )


def marks(said: str) -> list[str]:
    """Returns where the times of each row with an arm come from."""
    arms = rf"\b({OURS}|{STOCK}|{STOCK_MODEL}|dequantize \+ matmul)  "
    rows = [line for line in said.splitlines() if re.search(arms, line)]
    return [re.findall(r"\b(?:measured|predicted)\b", row)[0] for row in rows]


def test_without_a_gpu_every_time_is_predicted(
    kept: Path, tmp_path: Path, printed: Run
) -> None:
    json_file, csv_file = tmp_path / "out.json", tmp_path / "out.csv"

    words = "8x64x256 64x256 --rows 4 --csv"
    said = printed(f"bench {words}", csv_file, "--json", json_file)

    assert marks(said) == ["predicted"] * 2
    assert "Nothing was measured" in said
    result = result_file.read(json_file)
    assert not result.is_measured
    assert result.machine.chip.startswith("emulator for")
    assert {row.problem.m for row in result.products} == {4}
    assert {row.clock for row in result.products} == {*CLOCKS}
    rows = [*csv.DictReader(io.StringIO(csv_file.read_text()))]
    assert len(rows) == len(result.products)
    assert {row["times"] for row in rows} == {"predicted"}
    assert {row["mlx"] for row in rows} == {result.machine.mlx}
    for row, expected in zip(rows, result.products, strict=True):
        assert int(row["rows"]) == expected.problem.m
        assert row["arm"] == expected.arm
        milliseconds = expected.timing.seconds * 1e3
        assert float(row["ms"]) == pytest.approx(milliseconds, rel=1e-4)


@pytest.mark.parametrize(
    ("command", "steps"), [("bench 4x64x256 8x64x256", 2), ("tune 4x64x256", 5)]
)
def test_bars_move_at_a_terminal_and_are_silent_elsewhere(
    command: str,
    steps: int,
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal, moved = Terminal(), tqdm.update
    moves: list[float] = []
    monkeypatch.setattr(
        tqdm, "update", lambda bar, n=1: moves.append(n) or moved(bar, n)
    )
    for stream in (sys.stderr, terminal):
        monkeypatch.setattr("sys.stderr", stream)
        assert main(command.split()) == 0

    assert capsys.readouterr().err == ""
    assert moves == 2 * steps * [1]
    assert f" {steps}/{steps} [" in terminal.getvalue()


def test_without_products_there_is_no_bar(
    kept: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, printed: Run
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)

    said = printed(f"bench --model {folder} --streams 1")

    assert "Generation" in said
    assert terminal.getvalue() == f"loading {folder}\n"


def test_all_commands_predict_one_time_of_a_plan(
    kept: Path, tmp_path: Path, printed: Run
) -> None:
    format_of_all, product = "--mode affine --bits 4 --group-size 64", "8x64x256"
    planned = json.loads(printed(f"plan {product} {format_of_all} --json"))
    words = f"--single-config {product} {format_of_all} --layout mlx --json"
    (profiled,) = json.loads(printed(f"profile {words}"))["profiles"]
    times = [planned["predicted_us"], profiled["point"]["seconds"] * 1e6]

    for command in ("bench", "tune"):
        path = tmp_path / f"{command}.json"
        printed(f"{command} {product} {format_of_all} --layout mlx --json {path}")
        rows = result_file.read(path).products
        plan = rows[0].plan
        assert plan is not None
        assert plan.explain() == profiled["plan"]
        times += [
            row.timing.seconds * 1e6
            for row in rows
            if row.plan == plan and row.clock == CHAIN
        ]

    assert len(times) == 4
    assert times == pytest.approx([times[0]] * 4, abs=0.01)


def test_without_shapes_the_emulator_takes_a_small_one(
    kept: Path, timed: list[Any], printed: Run
) -> None:
    printed("bench")

    assert [(each.m, each.n, each.k) for each in timed] == [
        (1, 256, 512),
        (8, 256, 512),
    ]


def test_on_a_gpu_layers_of_real_models_are_timed(
    on_metal: None, timed: list[Any], printed: Run
) -> None:
    printed("bench")

    assert {each.m for each in timed} >= {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
    assert {(each.k, each.n) for each in timed} >= {(4096, 14336), (17408, 5120)}


def test_a_shape_has_its_own_rows_unless_others_are_given(
    kept: Path, timed: list[Any], printed: Run
) -> None:
    printed("bench 3x64x256 96,256")
    assert [(each.m, each.n) for each in timed] == [(3, 64), (1, 96), (8, 96)]

    timed.clear()
    printed("bench 3x64x256 64x256 --rows 2,5 --mode mxfp4")
    assert [(each.m, each.mode) for each in timed] == [(2, "mxfp4"), (5, "mxfp4")]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for measuring, and lists what would be measured."""
    seen: list[Any] = []

    def measure(problem: Any, *_: Any, **__: Any) -> products.Measured:
        seen.append(problem)
        return products.Measured(rows=mac_file().products, faults=[], notes=[])

    monkeypatch.setattr(products, "measure", measure)
    return seen


def test_on_a_gpu_times_are_measured_by_both_clocks(
    on_metal: None, tmp_path: Path, printed: Run
) -> None:
    path = tmp_path / "out.json"

    said = printed("bench 4x64x256 --seconds 0.01 --json", path)

    assert marks(said) == ["measured"] * 6
    assert "range, ms" in said
    result = result_file.read(path)
    assert result.is_measured
    assert {row.arm for row in result.products} >= {OURS, STOCK}
    assert result.machine.chip == "Apple M3 Max"


def test_an_interrupted_run_keeps_what_it_has(
    kept: Path, tmp_path: Path, printed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, path = products.measure, tmp_path / "out.json"
    problems: list[Any] = []

    def measure(problem: Any, *rest: Any, **options: Any) -> products.Measured:
        problems.append(problem)
        if len(problems) > 1:
            raise KeyboardInterrupt
        return right(problem, *rest, **options)

    monkeypatch.setattr(products, "measure", measure)

    printed("bench 4x64x256 8x64x256 --json", path, status=130)

    assert {row.problem.m for row in result_file.read(path).products} == {4}


@pytest.fixture
def a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives commands a small model."""
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: (tiny_llama(), None))


@pytest.fixture
def generated(a_model: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for generating texts, and lists the sizes that are asked for."""
    asked: list[Any] = []

    def measure(_: str, __: dict[str, int], *sizes: Any) -> Iterator[GenerationRow]:
        asked.append(sizes)
        stock, ours = mac_file().generation
        yield from (stock, replace(ours, step=measured(10)))

    monkeypatch.setattr(generation, "models", lambda *_: {})
    monkeypatch.setattr(generation, "first_tokens", lambda *_: mac_file().first_tokens)
    monkeypatch.setattr(generation, "measure", measure)
    return asked


def test_an_interrupted_generation_keeps_the_streams_before_it(
    on_metal: None,
    generated: list[Any],
    tmp_path: Path,
    printed: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any) -> Iterator[GenerationRow]:
        yield from mac_file().generation
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "measure", interrupted)
    path = tmp_path / "out.json"

    printed("bench --model a/model --json", path, status=130)

    kept = result_file.read(path)
    assert kept.generation == mac_file().generation
    assert kept.first_tokens == mac_file().first_tokens


def test_a_wrong_product_fails_the_command(
    kept: Path, wrong_products: None, printed: Run
) -> None:
    said = printed("bench 4x64x256", status=1)

    assert "ours (mlx layout)" in said
    assert "its product is wrong; please report it" in said


def test_a_models_speed_is_predicted_without_a_gpu(
    kept: Path, a_model: None, tmp_path: Path, printed: Run
) -> None:
    path = tmp_path / "out.json"

    said = printed("bench --model a/model --streams 1,8 --json", path)

    assert marks(said) == ["predicted"] * 2
    assert "of the products of quantized layers" in said
    result = result_file.read(path)
    assert result.products == []
    found = {(row.model, row.streams) for row in result.generation}
    assert found == {("a/model", 1), ("a/model", 8)}


def test_a_models_speed_is_measured_on_a_gpu(
    on_metal: None, generated: list[Any], tmp_path: Path, printed: Run
) -> None:
    csv_file = tmp_path / "out.csv"
    words = "--model a/model --streams 4 --prompt 9 --new 7"

    said = printed(f"bench {words} --csv", csv_file)

    assert generated == [([4], 9, 7)]
    assert marks(said) == ["measured"] * 3
    first, *both = (line.split() for line in said.splitlines() if "measur" in line)
    assert first[-2:] == ["1500", "0.25"]
    # Two streams, 20 ms a step and 10.
    assert [line[-1] for line in both] == ["100", "200"]
    rows = [*csv.DictReader(io.StringIO(csv_file.read_text()))]
    assert [row["table"] for row in rows] == ["Generation"] * 2 + ["First token"]
    assert [row["ms a step"] for row in rows] == ["20.0", "10.0", ""]


def test_the_heading_names_what_times_depend_on() -> None:
    said = bench.heading(FACTS, True)

    for part in ("Apple M3 Max", "40 cores", "Darwin 26.1", "MLX 0.32.4", "abc1234"):
        assert part in said
    assert bench.PREDICTED not in said
