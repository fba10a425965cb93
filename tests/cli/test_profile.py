"""`mlx-marlin profile`: figures, marks of every time, refusals and arguments."""

import json
import re
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from cli.conftest import Run
from mlx_marlin import guard
from mlx_marlin.backends import measured_results, planner
from mlx_marlin.cli import profile as command
from mlx_marlin.cli import profiled
from mlx_marlin.cli.main import main
from mlx_marlin.measure import clocks, timing, tuner
from mlx_marlin.planning.measurement import Result
from support.choose import Choose
from support.marks import needs_emulator
from support.models import tiny_llama
from support.tune_commands import PROBLEM, on_h200

DERIVED = re.compile(
    r"\d ?(ms|us|s|seconds?|TFLOPS|GB/s|%)(?![\w/])"
    r"|^(ms|TFLOPS|GB/s|compute %|memory %|% of roof|bottleneck) .*(\d|[A-Z]{4})"
)
"""A time, or a figure that depends on one."""
MARK = re.compile(r"\b(measured|predicted|assumed)\b")
ROW = re.compile(r" *\d+  ")
"""A row of the table."""
M4_MAX = "--chip 'Apple M4 Max'"

DOCUMENT = Path(__file__).parents[2] / "docs" / "profiling.md"


def unmarked(printed: str) -> list[str]:
    """Returns lines with a time, or what follows from one, that name no origin.

    The line of the device states peaks, which no time was taken for.
    """
    return [
        line
        for line in printed.splitlines()
        if (DERIVED.search(line) or ROW.match(line))
        and not MARK.search(line)
        and ": peaks " not in line
    ]


@pytest.fixture
def profile(printed: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command without counters, and checks the marks of what it prints."""
    monkeypatch.setattr(profiled, "MOST_COUNTED", 0)
    return partial(marked, printed)


def marked(printed: Run, line: str, *words: object, status: int = 0) -> str:
    text = printed(f"profile {line}", *words, status=status)
    assert unmarked(text) == []
    return text


def figures(printed: str) -> dict[str, str]:
    """Returns the details of the first kernel by name."""
    _, *lines = printed.split("\n\n")[1].splitlines()
    return {line[: command.WIDTH].strip(): line[command.WIDTH :] for line in lines}


def test_the_example_of_one_row(profile: Run) -> None:
    words = f"--single-config 1,4096,4096 --bits 3 {M4_MAX} --assume-ms"
    printed = profile(f"{words} 0.042")
    found = figures(printed)

    assert "peaks 16.16 TFLOPS and 546 GB/s, ridge point 29.6 FLOP/byte" in printed
    assert found["ms"] == "0.042 (assumed)"
    assert found["TFLOPS"] == "0.7989 (assumed)"
    assert found["GB/s"] == "156.4 (assumed)"
    assert found["compute %"] == "4.944 (assumed)"
    assert found["memory %"] == found["% of roof"] == "28.65 (assumed)"
    assert found["operands"] == (
        "codes 6291456, scales 262144, activations 8192, result 8192, total 6569984 "
        "(bytes, each once)"
    )
    assert found["FLOP/byte"] == "5.107"
    assert found["bottleneck"].startswith("LATENCY: ")
    assert "\n1 row of 4096→4096, symmetric 3-bit, group 128" in printed
    assert "LOW OCCUPANCY: only 128 threadgroups of 2 simdgroups for 40" in printed
    cached = profile(f"{words} 0.012", status=1)
    assert "likely cause: the operands were in a cache" in cached


def test_the_example_of_512_rows_is_impossible(profile: Run) -> None:
    words = f"--single-config 512,4096,4096 --bits 3 {M4_MAX}"
    printed = profile(f"{words} --assume-ms 0.85", status=1)
    found = figures(printed)

    assert found["TFLOPS"] == "20.21 (assumed)"
    assert found["compute %"] == "125.1 (assumed)"
    assert "total 14942208 (bytes" in found["operands"]
    assert found["bottleneck"] == "IMPOSSIBLE (assumed)"
    said = printed.splitlines()[-1]
    assert said.startswith("IMPOSSIBLE (assumed): 512 x 4096→4096, ")
    assert "1.251 times the peak of 16.16 TFLOPS; " in said
    assert "% of roof" not in found


def test_without_options_the_default_set_is_profiled(profile: Run) -> None:
    printed = profile(M4_MAX)
    rows = [line for line in printed.splitlines() if "  predicted  " in line]

    sizes = {tuple(row.split()[:2]) for row in rows}
    assert len(rows) == len(sizes) == 12
    assert {m for m, _ in sizes} == {"1", "8", "32", "512"}
    assert "format: affine 4-bit g64; dtype: float16; layout: mlx" in printed
    printed = profile(f"--kernel gemv {M4_MAX}")
    assert printed.count("  predicted  ") == 3
    assert printed.count("no profile of gemv: gemv takes at most 5 rows") == 9


def test_every_kernel_is_profiled_or_left_out_with_a_reason(
    profile: Run, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    words = f"--single-config 8x4096x4096 {M4_MAX} --all-kernels"
    printed = profile(f"{words} --json", path)
    data = json.loads(path.read_text("utf-8"))

    kernels = [row["kernel"].split()[0] for row in data["profiles"]]
    assert kernels == ["gemm_register", "gemm_staged"]
    assert {row["origin"] for row in data["profiles"]} == {"predicted"}
    skipped = {row["kernel"]: row["reason"] for row in data["skipped"]}
    assert [*skipped] == ["gemv", "gemm_tensor"]
    assert all(
        f"no profile of {each}: {skipped[each]}\n" in printed for each in skipped
    )
    assert "at most 5 rows" in skipped["gemv"]
    assert "expected an M5" in skipped["gemm_tensor"]


def test_stock_mlx_is_compared_only_where_it_is_measured(profile: Run) -> None:
    words = "--single-config 8,4096,4096 --compare stock"
    printed = profile(f"{words} --chip H200")

    assert "mma 8x32x128" in printed
    said = "no profile of stock MLX: the time of stock MLX is measured, not predicted\n"
    assert said in printed
    assert "max simdgroups 64, " in printed
    printed = profile(f"{words} {M4_MAX} --mode affine --group-size 256")
    assert "group 256" in printed
    assert "no profile of stock MLX: stock MLX has no groups of 256" in printed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "symmetric 4-bit, group 128, float16 with float16 scales, marlin layout"),
        ("--mode affine", "affine 4-bit, group 128, float16 with float16 scales, "),
        ("--mode mxfp8", "mxfp8 8-bit, group 32, float16 with uint8 scales, mlx"),
        ("--mode nvfp4", "nvfp4 4-bit, group 16, float16 with uint8 scales, mlx"),
        ("--mode affine --layout marlin", "float16 scales, marlin layout"),
        ("--mode zero_point --group-size 4096", "group 4096, "),
    ],
)
def test_the_format_of_a_single_product(
    profile: Run, words: str, expected: str
) -> None:
    assert expected in profile(f"--single-config 1,4096,4096 {M4_MAX} {words}")


@needs_emulator
def test_the_emulator_counts_what_the_plan_does(
    backend: Choose, printed: Run, tmp_path: Path
) -> None:
    backend("emulator")
    path = tmp_path / "profile.json"

    said = marked(printed, f"--single-config 16,64,256 {M4_MAX} --export-json", path)

    (row,) = json.loads(path.read_text("utf-8"))["profiles"]
    # 16 x 64 x 256 in products of 8 x 8 x 8.
    assert row["counts"]["matrix_products"] == 2 * 8 * 32
    assert "matrix products 512" in said
    counted = row["counts"]["read_bytes"] + row["counts"]["written_bytes"]
    # The plan leaves out the arrays of the schedule, and scales that are read twice.
    assert row["traffic"]["total"] <= counted <= 1.5 * row["traffic"]["total"]


@pytest.mark.parametrize("table", ["", "--compare stock", "--kernel gemv"])
def test_nothing_is_counted_that_is_not_shown(
    table: str, profile: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(
        profiled, "_counts", lambda plan: counted.append(plan.problem.m)
    )

    profile(f"{table} {M4_MAX}")
    assert counted == []

    profile(f"{table} {M4_MAX} --json", tmp_path / "profile.json")
    assert counted
    counted.clear()
    profile(f"--single-config 8,4096,4096 {M4_MAX}")
    assert counted == [8]


MEASURED = "--single-config 4,64,256 --mode affine --group-size"


@pytest.fixture
def measuring(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the emulator the device, and its clock that of a GPU."""
    clock = clocks.Clock(
        name="wall time",
        measure=partial(clocks.wall_time, seconds=0.01),
        measure_independent=partial(clocks.wall_time, seconds=0.01),
        weights=lambda _: 2,
        times_stock=True,
    )
    monkeypatch.setattr(timing, "LONGEST", 4)
    monkeypatch.setattr(profiled, "on_gpu", lambda: True)
    monkeypatch.setattr(clocks, "clock_of", lambda _: clock)


@needs_emulator
def test_a_device_is_measured(measuring: None, printed: Run, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"

    said = marked(printed, f"{MEASURED} 64 --compare stock --export-json", path)

    assert len(re.findall(r"^ms +[\d.]+ \(measured\)$", said, re.MULTILINE)) == 2
    rows = json.loads(path.read_text("utf-8"))["profiles"]
    assert [row["served_by"] for row in rows] == ["ours", "stock"]
    assert {row["origin"] for row in rows} == {"measured"}
    assert all(row["point"]["seconds"] > 0 for row in rows)
    assert all(row["counts"] is None for row in rows)


@needs_emulator
def test_a_measured_plan_is_the_tuned_one(
    measuring: None, monkeypatch: pytest.MonkeyPatch, printed: Run
) -> None:
    tuned = planner.make(PROBLEM, strategy="stripe", k_parallel=2)
    result = Result(
        plan=tuned,
        stock=False,
        medians_us={tuner.name(tuned): 1.0},
        clock="wall time",
        date="2026-11-24",
    )
    monkeypatch.setattr(measured_results, "find", lambda *_: result)

    assert tuned.explain() in printed(f"profile {MEASURED} 64")


@needs_emulator
def test_what_cannot_be_measured_is_left_out(
    measuring: None, monkeypatch: pytest.MonkeyPatch, refused: Run
) -> None:
    said = "group_size=16 is not one of (32, 64, 128)"
    assert said in refused(f"profile {MEASURED} 16")

    monkeypatch.setattr(guard, "why_not", lambda _: "the kernel is wrong")
    said = "nothing can be profiled: the kernel is wrong"
    assert said in refused(f"profile {MEASURED} 64")


def test_a_gpu_of_this_machine_is_measured(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_h200(backend, monkeypatch)
    assert profiled.on_gpu()
    monkeypatch.setenv("MLX_MARLIN_DEVICE", "NVIDIA H100")
    assert not profiled.on_gpu()


def test_the_layers_of_a_model_are_profiled(
    profile: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tied=False)
    monkeypatch.setattr(mlx_lm, "load", lambda name, *, lazy: (model, None))
    printed = profile(f"--model some/model {M4_MAX}")
    rows = [line for line in printed.splitlines() if "  predicted  " in line]

    assert rows
    assert len(rows) % 4 == 0
    assert "layout: mlx" in printed
    packed = profile(f"--model some/model --layout marlin {M4_MAX}")
    assert "layout: marlin" in packed


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("name", ["M1", "M2 Ultra", "M3", "M4 Pro", "M5", "A100"])
def test_few_rows_on_every_generation(profile: Run, m: int, name: str) -> None:
    assert "occupancy" in profile(f"--single-config {m},4096,4096 --chip '{name}'")


@pytest.mark.parametrize(
    "line",
    [
        *("time  0.042 ms", "ms  0.042", "bottleneck  MEMORY", "compute 4.9 %"),
        *("0.80 TFLOPS and 156 GB/s", "took 3 s", "1us"),
        *("   8  MEMORY",),  # a row of the table
    ],
)
def test_a_line_without_a_mark_is_found(line: str) -> None:
    assert unmarked(f"rows  bottleneck  times\n{line}") == [line]
    assert unmarked(f"{line} (predicted)") == []


def test_the_document_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "--help"])
    options = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    rows = re.findall(r"^\| (`--.*?) \|", DOCUMENT.read_text("utf-8"), re.MULTILINE)

    assert set(re.findall(r"--[a-z-]+", " ".join(rows))) == options


@needs_emulator
def test_the_documents_capture_runs(
    backend: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metal is absent here: what starts and ends the capture is recorded."""
    calls: list[tuple[str, ...]] = []
    backend("emulator")
    for name in ("start_capture", "stop_capture"):
        call = partial(lambda *given: calls.append(given), name)
        monkeypatch.setattr(mx.metal, name, call)
    monkeypatch.setattr(mx, "synchronize", lambda: calls.append(("synchronize",)))
    (block,) = re.findall(
        r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL
    )

    exec(compile(block, DOCUMENT.name, "exec"), {})

    assert calls == [
        ("start_capture", "marlin.gputrace"),
        ("synchronize",),
        ("stop_capture",),
    ]
