"""`mlx-marlin plan` draws Marlin's picture and refuses nonsense in one line."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.cli.main import main
from mlx_marlin.cli.pictures import text
from mlx_marlin.cli.pictures.text import tile_map, timeline
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.planning.work.work import STRATEGIES
from mlx_marlin.tables import PIPED
from support.processes import run_python

KEYS = {
    *("strategy", "variant", "tile", "threadgroups", "splits", "busy", "reason"),
    *("predicted_us", "independent_us", "bytes", "dispatches"),
}
MODEL = "(model, not measured)"
MARLIN = "--strategy stripe --partition ceil --threadgroups 5 --k-parallel 1"
OF_M4 = "16 4096 4096 --chip 'M4 Max' --simdgroups-k 1"
OF_M5 = "16 4096 4096 --chip 'M5 Max' --kernel gemm_tensor"
Lines = Callable[[str], list[str]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str], printed: Run) -> Lines:
    """Returns what runs the command, and returns the lines that it prints."""

    def run(words: str) -> list[str]:
        found = printed(f"plan {words}").splitlines()
        assert capsys.readouterr().err == ""
        return found

    return run


@pytest.fixture
def figures(lines: Lines) -> Callable[[str], Any]:
    """Returns what runs the command with --json, and returns what it prints."""
    return lambda words: json.loads("\n".join(lines(f"{words} --json")))


@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("chip", ["M3 Max", "H200"])
def test_tables_and_diagrams_are_at_most_120_columns_wide(
    m: int, layout: str, chip: str, lines: Lines
) -> None:
    for line in lines(f"{m} 4096 14336 --layout {layout} --chip '{chip}' --all"):
        is_sentence = ", " in line and "(" in line
        assert len(line) <= PIPED or is_sentence, line


def test_three_by_three_tiles_on_five_draw_the_picture_of_marlin(lines: Lines) -> None:
    printed = lines(f"192 96 64 {MARLIN}")

    start = printed.index("threadgroups of each tile of 64 x 32")
    assert printed[start + 1 : start + 5] == [
        "  col | 0 | 1 | 2 |",
        "row 0 | 0 | 1 | 3 |",
        "row 1 | 0 | 2 | 3 |",
        "row 2 | 1 | 2 | 4 |",
    ]


def test_the_words_name_problem_device_plan_cost_and_server(lines: Lines) -> None:
    printed = lines("8 4096 4096 --chip 'Apple M3 Max'")

    assert printed[0].startswith("problem   8 rows of 4096→4096, affine 4-bit")
    assert printed[1].startswith("device    Apple M3 Max 40-core GPU: 40 cores")
    assert printed[2].startswith("plan      gemm_register 8x32x64, ")
    assert printed[3].startswith("cost      predicted ")
    assert MODEL in printed[3]
    assert printed[4] == "served by this plan, where nobody has measured"


def test_a_plan_is_followed_by_its_map_and_timeline(lines: Lines) -> None:
    printed = lines("16 5120 17408 --chip M4")
    choice = planner.plan(16, 5120, 17408, chip="M4")

    pictures = f"\n\n{tile_map(choice.plan)}\n\n{timeline(choice)}"
    assert "\n".join(printed).endswith(pictures)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("1 4096 4096", "stock MLX: 1 row on .* by the table .* .not measured here.$"),
        ("1 4096 4096 --layout marlin", "this plan: stock MLX cannot read a packed"),
        ("1 4096 4096 --invariant", "this plan: stock MLX's bits of a row depend on"),
        (f"{OF_M4} --strategy data_parallel", "stock MLX: .* 2.22 times the time of"),
        (OF_M4, "this plan, where nobody has measured"),  # 1.01 times
        (f"{OF_M5} --simdgroups-k 1", "stock MLX: 16 rows .*: this plan is predicted"),
    ],
)
def test_who_serves_is_said_with_the_reason(
    lines: Lines, options: str, reason: str
) -> None:
    assert re.match(f"served by {reason}", lines(f"--chip 'M3 Max' {options}")[4])


def test_cores_change_the_device_with_and_without_a_chip(lines: Lines) -> None:
    named = lines("8 64 64 --chip 'M3 Max' --cores 30")
    here = lines("8 64 64 --cores 17")

    assert "Apple M3 Max 30-core GPU: 30 cores, 307.2 GB/s" in named[1]
    assert ": 17 cores, " in here[1]


STREAM = "--strategy stream_k --simdgroups-k 1"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--strategy stream_k", {"strategy": "stream_k"}),
        ("--partition ceil", {"strategy": "stripe", "work.partition": "ceil"}),
        ("--strategy split_k --k-parallel 3", {"work.slices": 3, "threadgroups": 30}),
        (f"{STREAM} --threadgroups 7", {"threadgroups": 7, "simdgroups_k": 1}),
        (f"{STREAM} --minimum 3", {"work.minimum": 3}),
        (f"{STREAM} --threadgroups 6 --groups 2", {"work.groups": 2}),
        ("--strategy hybrid --whole 4", {"work.whole": 4}),
        ("--strategy hytis --simdgroups-n 2 --whole 2", {"simdgroups_n": 2}),
        (f"{STREAM} --threadgroups 7 --reduction atomic", {"reduction": "atomic"}),
        ("--kernel gemm_register", {"kernel": "gemm_register"}),
        ("", {"kernel": "gemv"}),
        ("--layout marlin", {"problem.layout": "marlin"}),
        ("--group-size 32", {"problem.group_size": 32}),
        ("--bits 3", {"problem.bits": 3, "problem.group_size": 64}),
        ("--mode nvfp4", {"problem.group_size": 16, "problem.scale_dtype": "uint8"}),
        ("--mode mxfp8 --dtype bfloat16", {"problem.bits": 8}),
        (
            "--mode symmetric --bits 6 --group-size 128 --layout marlin",
            {"problem.mode": "symmetric", "problem.bits": 6, "problem.group_size": 128},
        ),
        ("--dtype bfloat16", {"problem.scale_dtype": "bfloat16"}),
        ("--batch 3", {"problem.batch": 3, "work.tiles": 3 * 10}),
        ("--bias", {"problem.epilogue": Epilogue(bias=True)}),
        ("--activation silu", {"problem.epilogue": Epilogue(activation="silu")}),
        ("--multiply", {"problem.epilogue": Epilogue(multiply=True)}),
        ("--residual", {"problem.epilogue": Epilogue(residual=True)}),
        ("--invariant", {"problem.invariant": True, "kernel": "gemm_register"}),
    ],
)
def test_every_option_reaches_the_plan(
    lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    expected: dict[str, Any],
) -> None:
    drawn: list[Plan] = []
    monkeypatch.setattr(text, "tile_map", lambda plan: drawn.append(plan) or "")

    printed = lines(f"2 320 1280 --chip M4 {options}")

    (plan,) = drawn
    assert printed[2] == f"plan      {plan.explain()}"
    found = {"threadgroups": plan.num_threadgroups, "strategy": plan.strategy}
    for name, value in expected.items():
        *owner, field = name.split(".")
        of = getattr(plan, owner[0]) if owner else plan
        assert (found[name] if name in found else getattr(of, field)) == value


def test_json_is_the_problem_and_the_figures_of_the_choice(
    figures: Callable[[str], Any],
) -> None:
    printed = figures("16 2560 9728 --chip M3 --mode mxfp8 --batch 3 --bias")
    problem = problem_of(
        16, 2560, 9728, mode="mxfp8", batch=3, epilogue=Epilogue(bias=True)
    )
    choice = planner.compare(problem, device=Device.named("M3"))

    assert printed.keys() >= KEYS
    asked = printed.pop("problem")
    assert printed == choice.figures()
    finish = asked["epilogue"]
    epilogue = Epilogue(**finish | {"parts": tuple(finish["parts"])})
    assert Problem(**asked | {"epilogue": epilogue}) == problem
    assert printed["measured"] is False


def test_a_batch_is_said_and_drawn(lines: Lines) -> None:
    printed = lines("2 64 512 --chip M4 --batch 3")
    choice = planner.plan(2, 64, 512, chip="M4", batch=3)

    assert "each of 3 weights" in printed[0]
    assert f"plan      {choice.plan.explain()}" == printed[2]
    start = printed.index("threadgroups of each tile of 2 x 32, columns a product: 2")
    assert printed[start + 1 : start + 3] == [
        "  col | 0 | 1 | 2 | 3 | 4 | 5 |",
        "row 0 | 0 | 1 | 2 | 3 | 4 | 5 |",
    ]


def test_json_of_all_lists_the_candidates_the_chosen_one_first(
    figures: Callable[[str], Any],
) -> None:
    printed = figures("8 224 5120 --chip M4 --cores 5 --all")
    problem = Problem(m=8, n=224, k=5120)
    choice = planner.compare(problem, device=Device.named("M4", 5))

    candidates = printed["candidates"]
    assert candidates[0] == choice.figures()
    assert all(each.keys() >= KEYS for each in candidates)
    assert [
        (each["strategy"], each["threadgroups"], each["predicted_us"])
        for each in candidates
    ] == [
        (each.plan.strategy, each.plan.num_threadgroups, round(each.seconds * 1e6, 2))
        for each in choice.candidates
    ]
    assert len({each["strategy"] for each in candidates}) > 2
    stripes = figures("8 224 5120 --chip M4 --cores 5 --all --strategy stripe")
    assert {each["strategy"] for each in stripes["candidates"]} == {"stripe"}


def test_all_prints_the_table_and_pictures_of_every_strategy(lines: Lines) -> None:
    printed = lines("8 224 5120 --chip M4 --cores 5 --all")
    problem = Problem(m=8, n=224, k=5120)
    choice = planner.compare(problem, device=Device.named("M4", 5))

    text = "\n".join(printed)
    assert f"compared, times in us {MODEL}\n{choice.table()}\n" in text
    heads = [line for line in printed if line.startswith("# ")]
    assert [line.split()[1] for line in heads] == [f"{name}," for name in STRATEGIES]
    assert all(line.endswith(f" us {MODEL}") for line in heads)
    assert printed.count("threadgroups of each tile of 8 x 32") == 5
    assert printed.count("threadgroups of each tile of 8 x 32, wide ones 8 x 64") == 1
    for strategy in STRATEGIES:
        same = (each for each in choice.candidates if each.plan.strategy == strategy)
        if best := next(same, None):
            assert f"{best.plan.explain()}\n\n{tile_map(best.plan)}\n" in text


def test_all_says_why_a_strategy_has_no_plan(lines: Lines) -> None:
    printed = lines("8 32 512 --chip M4 --all --invariant")

    (reason,) = [line for line in printed if line.startswith("stripe: no plan, ")]
    assert "invariant=True needs" in reason


def test_what_is_wished_narrows_every_strategy(lines: Lines) -> None:
    words = "8 224 5120 --chip M4 --cores 5 --all --threadgroups 5"
    printed, one = lines(words), lines(f"{words} --strategy stripe")

    missing = [line for line in printed if ": no plan, " in line]
    names = [line.partition(":")[0] for line in missing]
    assert names == ["data_parallel", "split_k", "hytis"]
    assert missing[0].endswith("data_parallel does not take num_threadgroups=5")
    assert [line.split()[1] for line in one if line.startswith("# ")] == ["stripe,"]


def test_more_threadgroups_than_work_are_idle(lines: Lines) -> None:
    assert "idle: 2-65534" in lines("8 64 64 --strategy stripe --threadgroups 65535")


def test_a_picture_of_too_many_threadgroups_is_not_drawn(
    tmp_path: Path, lines: Lines, refused: Run
) -> None:
    words = "1 16000000 64 --bits 1 --group-size 32"
    path = tmp_path / "plan.svg"

    assert lines(words)[-1].startswith("not drawn: 500000 threadgroups, more than the")
    said = f"--save {path}: not drawn: 500000 threadg"
    assert said in refused(f"plan {words} --save", path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        *((line, "usage: mlx-marlin") for line in ("", "dance", "plan")),
        ("profile --single-config 1,64,64 --model a", "--model: not allowed with arg"),
        ("profile --kernel gemv --all-kernels", "not allowed with argument --kernel"),
    ],
)
def test_wrong_usage_exits_with_two(
    capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(line.split())

    assert exited.value.code == 2
    assert said in capsys.readouterr().err


def test_help_lists_the_commands_without_importing_them() -> None:
    program = """
import sys
from mlx_marlin.cli.main import COMMANDS, main
try:
    main(["--help"])
except SystemExit:
    loaded = [name for name in COMMANDS if f"mlx_marlin.cli.{name}" in sys.modules]
    print("loaded:", loaded)
"""
    answer = run_python(program)

    assert "show the plan of a matrix product" in answer.stdout, answer.stderr
    assert answer.stdout.endswith("loaded: []\n")


def test_the_command_runs_without_mlx_and_numpy() -> None:
    program = """
import sys
sys.modules["mlx"] = sys.modules["numpy"] = None
from mlx_marlin.cli.main import main
raise SystemExit(main(["plan", "1", "4096", "11008", "--cores", "40"]))
"""
    answer = run_python(program)

    assert answer.returncode == 0, answer.stderr
    assert "served by stock MLX" in answer.stdout
