"""`mlx-marlin plan` draws Marlin's picture and refuses nonsense in one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.cli.main import main
from mlx_marlin.cli.pictures.text import tile_map, timeline
from mlx_marlin.planning.choice import WIDTH
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.planning.work.division import STRATEGIES
from support.processes import run_python

KEYS = (
    "strategy",
    "variant",
    "tile",
    "threadgroups",
    "splits",
    "busy",
    "predicted_us",
    "independent_us",
    "stock_us",
    "stock_independent_us",
    "bytes",
    "dispatches",
    "reason",
)
MODEL = "(model, not measured)"


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Runs a command that succeeds and returns what it printed."""
    assert main(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


def figures(capsys: pytest.CaptureFixture[str], arguments: str) -> Any:
    """Runs the command with --json and returns what it printed: nothing else."""
    return json.loads("\n".join(lines(capsys, "plan", *arguments.split(), "--json")))


@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("chip", ["M3 Max", "H200"])
def test_tables_and_diagrams_are_at_most_120_columns_wide(
    m: int, layout: str, chip: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(m), "4096", "14336", "--layout", layout, "--chip", chip]
    assert main(["plan", *words, "--all"]) == 0

    for line in capsys.readouterr().out.splitlines():
        is_sentence = ", " in line and "(" in line
        assert len(line) <= WIDTH or is_sentence, line


def test_three_by_three_tiles_on_five_draw_the_picture_of_marlin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--strategy stripe --partition ceil --threadgroups 5 --k-parallel 1"
    printed = lines(capsys, "plan", "192", "96", "64", *options.split())

    start = printed.index("threadgroups of each tile of 64 x 32")
    assert printed[start + 1 : start + 5] == [
        "  col | 0 | 1 | 2 |",
        "row 0 | 0 | 1 | 3 |",
        "row 1 | 0 | 2 | 3 |",
        "row 2 | 1 | 2 | 4 |",
    ]


def test_seven_tiles_on_five_show_the_idle_threadgroup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--strategy stripe --partition ceil --threadgroups 5 --k-parallel 1"
    printed = lines(capsys, "plan", "8", "224", "512", *options.split())

    assert "idle: 4" in printed
    assert [line.split()[:3] for line in printed[-5:]] == [
        ["0", "0", "0-15"],
        ["1", "1", "16-31"],
        ["2", "2", "32-47"],
        ["3", "3", "48-55"],
        ["4", "idle"],
    ]
    assert any("ceil, at most 16 k tiles each, 1 idle" in line for line in printed)


def test_the_words_name_problem_device_plan_cost_stock_and_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = lines(capsys, "plan", "8", "4096", "4096", "--chip", "Apple M3 Max")

    assert printed[0].startswith("problem   8 rows of 4096→4096, affine 4-bit")
    assert printed[1].startswith("device    Apple M3 Max 40-core GPU: 40 cores")
    assert printed[2].startswith("plan      gemm_register 8x32x64, ")
    assert printed[3].startswith("cost      predicted ")
    assert printed[4].startswith("stock     qmv_wide, ")
    assert re.match(
        r"served by this plan: \d\.\d\d times as fast as qmv_wide", printed[5]
    )
    assert all(MODEL in line for line in printed[3:6])


def test_a_plan_is_followed_by_its_map_and_timeline(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = lines(capsys, "plan", "16", "5120", "17408", "--chip", "M4")
    choice = planner.plan(16, 5120, 17408, chip="M4")

    pictures = f"\n\n{tile_map(choice.plan)}\n\n{timeline(choice)}"
    assert "\n".join(printed).endswith(pictures)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("1 4096 4096", f"stock MLX: 1 row .* Apple M3 Max .*{re.escape(MODEL)}"),
        ("1 4096 4096 --layout marlin", "this plan: stock MLX cannot read a packed"),
        ("1 4096 4096 --invariant", "this plan: stock MLX's bits of a row depend on"),
    ],
)
def test_who_serves_is_said_with_the_reason(
    capsys: pytest.CaptureFixture[str], options: str, reason: str
) -> None:
    printed = lines(capsys, "plan", *options.split(), "--chip", "M3 Max")

    assert re.match(f"served by {reason}", printed[5])


def test_cores_change_the_device_with_and_without_a_chip(
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = lines(capsys, "plan", "8", "64", "64", "--chip", "M3 Max", "--cores", "30")
    here = lines(capsys, "plan", "8", "64", "64", "--cores", "17")

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
        (
            "--mode nvfp4",
            {
                "problem.mode": "nvfp4",
                "problem.bits": 4,
                "problem.group_size": 16,
                "problem.scale_dtype": "uint8",
            },
        ),
        ("--mode mxfp8 --dtype bfloat16", {"problem.bits": 8}),
        (
            "--mode symmetric --bits 6 --group-size 128 --layout marlin",
            {"problem.mode": "symmetric", "problem.bits": 6, "problem.group_size": 128},
        ),
        (
            "--dtype bfloat16",
            {"problem.dtype": "bfloat16", "problem.scale_dtype": "bfloat16"},
        ),
        ("--batch 3", {"problem.batch": 3, "work.tiles": 3 * 10}),
        ("--bias", {"problem.epilogue": Epilogue(bias=True)}),
        ("--activation silu", {"problem.epilogue": Epilogue(activation="silu")}),
        ("--multiply", {"problem.epilogue": Epilogue(multiply=True)}),
        ("--residual", {"problem.epilogue": Epilogue(residual=True)}),
        ("--invariant", {"problem.invariant": True, "kernel": "gemm_register"}),
    ],
)
def test_every_option_reaches_the_plan(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    expected: dict[str, Any],
) -> None:
    drawn: list[Plan] = []

    def keep(plan: Plan) -> str:
        drawn.append(plan)
        return ""

    monkeypatch.setattr("mlx_marlin.cli.pictures.text.tile_map", keep)
    printed = lines(
        capsys, "plan", "2", "320", "1280", "--chip", "M4", *options.split()
    )

    (plan,) = drawn
    assert printed[2] == f"plan      {plan.explain()}"
    found = {"threadgroups": plan.num_threadgroups, "strategy": plan.strategy}
    for name, value in expected.items():
        *owner, field = name.split(".")
        of = getattr(plan, owner[0]) if owner else plan
        assert (found[name] if name in found else getattr(of, field)) == value


def test_json_is_the_problem_and_the_figures_of_the_choice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = figures(capsys, "16 2560 9728 --chip M3 --bias")
    problem = Problem(m=16, n=2560, k=9728, epilogue=Epilogue(bias=True))
    choice = planner.compare(problem, device=Device.named("M3"))

    assert set(KEYS) <= printed.keys()
    asked = printed.pop("problem")
    assert printed == choice.figures()
    finish = asked["epilogue"]
    epilogue = Epilogue(**finish | {"parts": tuple(finish["parts"])})
    assert Problem(**asked | {"epilogue": epilogue}) == problem
    assert printed["measured"] is False


def test_a_batch_is_said_drawn_and_carried(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan 2 64 512 --chip M4 --batch 3"
    printed = lines(capsys, *words.split())
    choice = planner.plan(2, 64, 512, chip="M4", batch=3)

    assert "each of 3 weights" in printed[0]
    assert f"plan      {choice.plan.explain()}" == printed[2]
    start = printed.index("threadgroups of each tile of 2 x 32, columns a product: 2")
    assert printed[start + 1 : start + 3] == [
        "  col | 0 | 1 | 2 | 3 | 4 | 5 |",
        "row 0 | 0 | 1 | 2 | 3 | 4 | 5 |",
    ]
    asked = figures(capsys, "2 64 512 --chip M4 --batch 3")["problem"]
    assert asked["batch"] == choice.plan.problem.batch == 3


def test_json_carries_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    asked = figures(capsys, "16 2560 9728 --chip M3 --mode mxfp8")["problem"]

    assert asked["mode"] == "mxfp8"
    assert asked["bits"] == 8
    assert asked["group_size"] == 32
    assert asked["scale_dtype"] == "uint8"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_narrows_the_json(
    capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    printed = figures(capsys, f"16 2560 9728 --chip M3 --all --strategy {strategy}")

    assert printed["strategy"] == strategy
    assert {each["strategy"] for each in printed["candidates"]} == {strategy}


def test_json_of_all_lists_the_candidates_the_chosen_one_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = figures(capsys, "8 224 5120 --chip M4 --cores 5 --all")
    problem = Problem(m=8, n=224, k=5120)
    choice = planner.compare(problem, device=Device.named("M4", 5))

    candidates = printed["candidates"]
    assert candidates[0] == choice.figures()
    assert all(set(KEYS) <= each.keys() for each in candidates)
    assert [
        (each["strategy"], each["threadgroups"], each["predicted_us"])
        for each in candidates
    ] == [
        (each.plan.strategy, each.plan.num_threadgroups, round(each.seconds * 1e6, 2))
        for each in choice.candidates
    ]
    assert len({each["strategy"] for each in candidates}) > 2


def test_all_prints_the_table_and_pictures_of_every_strategy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "plan 8 224 5120 --chip M4 --cores 5 --all"
    printed = lines(capsys, *words.split())
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


def test_all_says_why_a_strategy_has_no_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "plan 8 32 512 --chip M4 --all --invariant"
    printed = lines(capsys, *words.split())

    (reason,) = [line for line in printed if line.startswith("stripe: no plan, ")]
    assert "invariant=True needs" in reason


def test_what_is_wished_narrows_every_strategy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "plan 8 224 5120 --chip M4 --cores 5 --all --threadgroups 5"
    printed = lines(capsys, *words.split())
    one = lines(capsys, *words.split(), "--strategy", "stripe")

    missing = [line for line in printed if ": no plan, " in line]
    assert [line.partition(":")[0] for line in missing] == [
        "data_parallel",
        "split_k",
        "hytis",
    ]
    assert missing[0].endswith("data_parallel does not take num_threadgroups=5")
    assert [line.split()[1] for line in one if line.startswith("# ")] == ["stripe,"]


def test_more_threadgroups_than_work_are_idle(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "8 64 64 --strategy stripe --threadgroups 65535"

    assert figures(capsys, words)["threadgroups"] == 65535
    assert "idle: 2-65534" in lines(capsys, "plan", *words.split())


def test_a_picture_of_too_many_threadgroups_is_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "1", "16000000", "64", "--bits", "1", "--group-size", "32"]

    printed = lines(capsys, *words)

    assert printed[-1].startswith("not drawn: 500000 threadgroups, more than the 26")
    path = tmp_path / "plan.svg"
    assert main([*words, "--save", str(path)]) == 2
    assert f"--save {path}: not drawn: 500000 threadg" in capsys.readouterr().err
    assert not path.exists()


SHAPES = [(17408, 5120), (9728, 2560), (11008, 2048), (11008, 4096)]


@pytest.mark.parametrize("chip", ["M3 Max", "M4 Pro"])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_the_plans_of_models_keep_the_cores_busy(
    capsys: pytest.CaptureFixture[str], chip: str, k: int, n: int
) -> None:
    assert main(["plan", "16", str(n), str(k), "--chip", chip, "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["busy"] >= 0.9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("0 64 64", "m=0"),
        ("8 64 100", "k=100 is not a multiple of group_size=64"),
        ("8 64 64 --batch 0", "batch=0 must be at least 1"),
        ("8 64 64 --group-size 48", "group_size=48"),
        ("8 64 64 --bits 7", "mode='affine' with bits=7 is not one of affine 1-bit"),
        ("8 64 64 --mode mxfp4 --bits 8", "mode='mxfp4' with bits=8 is not one"),
        ("8 64 64 --mode mxfp4 --group-size 64", "group_size=64 is not one of (32,)"),
        (
            "8 64 32 --mode nvfp4",
            "k=32 is not a multiple of 64, which nvfp4 with group_size=16 requires",
        ),
        ("8 64 64 --mode symmetric", "layout='mlx' is not one of ('marlin',)"),
        ("8 64 64 --chip Quartz", "device 'Quartz' is not one of: Apple M1"),
        ("8 64 64 --cores 0", "cores=0, expected 1 to 1024"),
        ("8 64 64 --cores -3", "cores=-3, expected 1 to 1024"),
        ("8 64 64 --cores 1000000000", "cores=1000000000, expected 1 to 1024"),
        ("8 64 64 --chip H200 --cores -3", "multiprocessors=-3, expected 1 to 1024"),
        (
            "8 64 64 --threadgroups 1000000000",
            "threadgroups=1000000000 is not between 1 and 65535",
        ),
        (
            "8 64 64 --chip H200 --json --threadgroups 1000000000",
            "threadgroups=1000000000 is not between 1 and 65535",
        ),
        ("8 64 64 --kernel gemv", "at most 5 rows"),
        ("8 64 64 --k-parallel 9", "k_parallel=9"),
        ("8 64 64 --threadgroups 0", "num_threadgroups=0"),
        ("8 64 64 --json --threadgroups 0", "num_threadgroups=0"),
        ("8 64 64 --strategy stripe --minimum 2", "stripe does not take minimum=2"),
        ("8 64 64 --strategy hybrid --whole 9", "whole=9 is not between"),
        ("8 64 64 --minimum 1 --k-parallel 1", "no strategy takes all of"),
        ("8 64 64 --simdgroups-k 9", "simdgroups_k=9"),
        ("8 64 64 --reduction atomic", "reduction='atomic' fits none"),
    ],
)
def test_nonsense_is_one_line_and_exit_status_two(
    capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    status = main(["plan", *arguments.split()])
    captured = capsys.readouterr()

    assert status == 2
    assert captured.out == ""
    assert captured.err.startswith("mlx-marlin: error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.parametrize("arguments", [[], ["dance"], ["plan"]])
def test_wrong_usage_exits_with_two(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)

    assert exited.value.code == 2
    assert "usage: mlx-marlin" in capsys.readouterr().err


def test_help_lists_the_commands_without_importing_them() -> None:
    program = """
import sys
from mlx_marlin.cli.main import COMMANDS, main
try:
    main(["--help"])
except SystemExit:
    loaded = [name for name, (module, _) in COMMANDS.items() if module in sys.modules]
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
