"""`mlx-marlin plan` draws Marlin's picture and refuses nonsense in one line."""

import subprocess
import sys

import pytest
from hypothesis import given
from strategies import plans

from mlx_marlin.cli import main
from mlx_marlin.cli.plan import picture
from mlx_marlin.plan import Plan


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Runs a command that succeeds and returns what it printed."""
    assert main(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


def test_three_by_three_tiles_on_five_draw_the_picture_of_marlin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--strategy stripe --partition ceil --threadgroups 5 --k-parallel 1"
    printed = lines(capsys, "plan", "192", "96", "64", *options.split())

    start = printed.index("threadgroups of each tile")
    assert [line.split() for line in printed[start + 1 : start + 5]] == [
        ["col", "0", "col", "1", "col", "2"],
        ["row", "0", "0", "1", "3"],
        ["row", "1", "0", "2", "3"],
        ["row", "2", "1", "2", "4"],
    ]


def test_seven_tiles_on_five_show_the_idle_threadgroup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--strategy stripe --partition ceil --threadgroups 5 --k-parallel 1"
    printed = lines(capsys, "plan", "8", "224", "64", *options.split())

    assert [line.split() for line in printed[-6:]] == [
        ["threadgroup", "units", "first", "last"],
        ["0", "2", "0", "1"],
        ["1", "2", "2", "3"],
        ["2", "2", "4", "5"],
        ["3", "1", "6", "6"],
        ["4", "0", "idle"],
    ]
    assert any("ceil, 1-2 units each, 1 idle" in line for line in printed)


def test_the_words_name_problem_device_plan_cost_and_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = lines(capsys, "plan", "8", "4096", "4096", "--chip", "Apple M3 Max")

    assert printed[0].startswith("problem   8 rows of 4096→4096, affine 4-bit")
    assert printed[1].startswith("device    Apple M3 Max 40-core GPU: 40 cores")
    assert printed[2].startswith("plan      gemm_register 8x32x64, ")
    assert printed[3].startswith("cost      predicted ")
    assert "not measured" in printed[3]
    assert printed[4] == "served by this plan"


def test_a_product_for_stock_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    printed = lines(capsys, "plan", "32", "4096", "4096", "--chip", "M3 Max")

    assert printed[4].startswith("served by stock MLX: 32 rows are close to")


def test_cores_change_the_device_with_and_without_a_chip(
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = lines(capsys, "plan", "8", "64", "64", "--chip", "M3 Max", "--cores", "30")
    here = lines(capsys, "plan", "8", "64", "64", "--cores", "17")

    assert "Apple M3 Max 30-core GPU: 30 cores, 307.2 GB/s" in named[1]
    assert ": 17 cores, " in here[1]


def test_every_option_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--group-size 32 --dtype bfloat16 --layout marlin --kernel gemm_register "
        "--strategy stripe --partition balanced --k-parallel 4 --threadgroups 7"
    )
    printed = lines(capsys, "plan", "2", "100", "320", *options.split())

    assert printed[0] == (
        "problem   2 rows of 320→100, affine 4-bit, group 32, bfloat16 with bfloat16 "
        "scales, marlin layout"
    )
    assert "gemm_register" in printed[2]
    assert "4 tiles, 4 slices of k, stripe over 7 threadgroups (bal" in printed[2]
    assert printed[-1].split() == ["6", "3", "13", "15"]


@given(plans())
def test_a_picture_names_the_threadgroups_whose_runs_meet_a_tile(plan: Plan) -> None:
    drawn = picture(plan).splitlines()
    runs = (plan.range(index) for index in range(plan.num_threadgroups))
    meet = [
        index
        for index, (begin, end) in enumerate(runs)
        if begin < min(end, plan.k_parallel)
    ]

    cell = f"{meet[0]}" if len(meet) == 1 else f"{meet[0]}-{meet[-1]}"
    assert drawn[2].split()[:3] == ["row", "0", cell]


@given(plans())
def test_a_picture_elides_the_middle_of_many_tiles(plan: Plan) -> None:
    drawn = picture(plan).splitlines()[1:]

    assert len(drawn) == 1 + min(plan.m_tiles, 13)
    assert len(drawn[0].split("col")) == 1 + min(plan.n_tiles, 12)
    assert drawn[0].split()[-1] == str(plan.n_tiles - 1)
    assert drawn[-1].split()[1] == str(plan.m_tiles - 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("0 64 64", "m=0"),
        ("8 64 100", "k=100 is not a multiple of group_size=64"),
        ("8 64 64 --group-size 48", "group_size=48"),
        ("8 64 64 --chip Quartz", "device 'Quartz' is not one of: Apple M1"),
        ("8 64 64 --cores 0", "cores=0"),
        ("8 64 64 --kernel gemv", "at most 5 rows"),
        ("8 64 64 --k-parallel 9", "k_parallel=9"),
        ("8 64 64 --threadgroups 0", "num_threadgroups=0"),
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


@pytest.mark.parametrize("arguments", [[], ["dance"], ["plan", "8", "64"]])
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
from mlx_marlin.cli import main
try:
    main(["--help"])
except SystemExit:
    loaded = [name for name in sys.modules if name.startswith("mlx_marlin.cli.")]
    print("loaded:", loaded)
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )

    assert "show how a product would be computed" in answer.stdout, answer.stderr
    assert answer.stdout.endswith("loaded: []\n")


def test_the_command_runs_without_mlx_and_numpy() -> None:
    program = """
import sys
sys.modules["mlx"] = sys.modules["numpy"] = None
from mlx_marlin.cli import main
raise SystemExit(main(["plan", "1", "4096", "11008", "--cores", "40"]))
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )

    assert answer.returncode == 0, answer.stderr
    assert "served by stock MLX" in answer.stdout
