"""The table of rivals: its counts of ours, how they scale, and the planner's."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import metal_emulator
from benchmarks import agx, rival_calls, rival_slots, rivals
from benchmarks.rival_calls import Counted
from mlx_marlin.backends.devices import named
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.launches import launches
from mlx_marlin.backends.metal.main_loop import (
    MATRIX_OPS,
    WEIGHTS_PER_TRIP,
    loop_of,
    loop_slots,
    rates_of,
    readers,
)
from mlx_marlin.planning.problem import problem_of
from support.profiles import sampled

pytestmark = pytest.mark.skipif(
    metal_emulator.unavailable() is not None, reason="the emulator does not run here"
)

CHIP = named("M4 Pro")
assert isinstance(CHIP, Device)
DEVICE: Device = CHIP
FORMATS = [(4, "float16"), (8, "bfloat16")]


@sampled(2)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize(("bits", "dtype"), FORMATS)
@pytest.mark.parametrize("m", rivals.ROWS)
def test_the_planner_counts_what_the_emulator_does(
    m: int, bits: int, dtype: str, layout: str
) -> None:
    """8x8 products, and lane bytes of the main loop: what twice as long a k adds."""
    short = problem_of(m, 256, 1024, bits=bits, dtype=dtype, layout=layout)
    both = [short, replace(short, k=2048)]
    plans = [rival_calls.plan_of(each, DEVICE, **rivals.WHOLE) for each in both]
    held, operand = plans[0].fragments_m, plans[0].operand
    found = [*map(rival_calls.ours, both, plans)]
    loops = [loop_of(each, held, operand, DEVICE) for each in both]

    products = sum(
        count * MATRIX_OPS[fragments]
        for fragments, count in (readers(m, held).items() if held else ())
    )
    assert found[0].matrix == products * short.n * short.k // WEIGHTS_PER_TRIP
    added = found[1].lane_bytes - found[0].lane_bytes
    assert added == loops[1].lane_bytes - loops[0].lane_bytes
    assert found[0].threads == found[1].threads


@pytest.mark.skipif(agx.missing() is not None, reason=f"the AGX aid: {agx.missing()}")
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("bits", rivals.BITS)
@pytest.mark.parametrize("m", [8, 16])
def test_the_planner_has_the_slots_of_the_table(m: int, bits: int, layout: str) -> None:
    problem = problem_of(m, 256, 1024, bits=bits, layout=layout)
    plan = rival_calls.plan_of(problem, DEVICE, **rivals.WHOLE)
    held, price = plan.fragments_m, rates_of(DEVICE).matrix_slots

    slots = loop_slots(problem, held, plan.operand, m, DEVICE) * WEIGHTS_PER_TRIP

    pairs = readers(m, held).items()
    products = sum(count * MATRIX_OPS[fragments] for fragments, count in pairs)
    counted = rival_slots.ours(plan).slots
    assert round(slots - price * products) == counted - agx.MATRIX_SLOTS * products


@sampled(1)
@pytest.mark.parametrize(
    ("m", "fields"),
    [
        (3, {"strategy": "data_parallel"}),
        (8, {"strategy": "hytis", "simdgroups_k": 2}),
        (13, {"strategy": "split_k", "k_parallel": 2}),
        (24, {"strategy": "data_parallel"}),
    ],
)
def test_few_columns_multiplied_are_all_columns(
    m: int, fields: dict[str, object]
) -> None:
    problem = problem_of(m, 4096, 256)
    plan = rival_calls.plan_of(problem, DEVICE, **fields)
    assert plan.work.strategy == fields["strategy"]
    few = sum(part.problem.n for _, part in rival_calls.shares(plan))
    assert (few < problem.n) == plan.is_whole

    found = rival_calls.ours(problem, plan)

    assert found == rival_calls.ours(problem, plan, exact=True)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets nothing be downloaded: the rival costs what MLX does."""
    theirs = Counted(kernel="theirs", matrix=0, bytes=10, lane_bytes=20, threads=32)
    for name in ("mlx", "rival"):
        monkeypatch.setattr(rival_calls, name, lambda *_, **__: theirs)


ARGUMENTS = ("--shapes", "64x256", "--bits", "4", "--dtypes", "float16", "--rows", "8")


@pytest.mark.usefixtures("alone")
def test_the_table_says_that_slots_are_not_counted(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("AGX_HOME", raising=False)

    assert rivals.main([*ARGUMENTS, "--json", str(tmp_path / "counts.json")]) == 0

    printed = capsys.readouterr().out.splitlines()
    assert "not installed (AGX_HOME is not set)" in printed[4]
    cells = [cell.strip() for cell in printed[-1].strip("|").split("|")]
    assert len(cells) == len(rivals.HEAD)
    assert cells[:5] == ["256→64", "4", "float16", "8", "gemm_register, theirs"]
    assert cells[5] == "256 (-, -)"
    assert cells[-3:] == ["?", "?", "? ? ?"]
    (row,) = json.loads((tmp_path / "counts.json").read_text())
    assert row["ours"]["counted"]["matrix"] == 64 * 256 // 64
    assert row["ours"]["slots"] is None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--shapes", "8x64x256"), "--shapes '8x64x256', expected NxK"),
        (("--chip", "NVIDIA H200"), "--chip 'NVIDIA H200', expected an Apple GPU"),
        (("--rows", "0"), "expected"),
        (("--exact",), "from few columns"),
    ],
)
def test_a_wrong_argument_or_count_is_told(
    wrong: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "--exact" in wrong:
        few = iter(range(2))
        monkeypatch.setattr(
            rival_calls,
            "ours",
            lambda *_, **__: Counted(
                kernel="ours", matrix=next(few), bytes=1, lane_bytes=1, threads=1
            ),
        )

    assert rivals.main([*ARGUMENTS, "--no-slots", *wrong]) == 2
    assert message in capsys.readouterr().err


AID = """
from dataclasses import dataclass

@dataclass
class Kernel:
    name: str
    inputs: list
    outputs: list
    source: str
    header: str
    template: dict
    threadgroup: tuple

def kernel_stats(kernel, levels):
    assert "read_work(shape" in kernel.source and "shape_6" in dict(kernel.inputs)
    assert not [word for word in ("float4(", "half2(") if word in kernel.header]
    if levels == ("-O0",):
        return [{"error": "no"}]
    loops = [(700, 32, True), (9, 0, True), (5, 0, False)]
    return [{"kernels": [{
        "max_reg16": 100,
        "demand16": 97,
        "code_bytes": 4000,
        "total": {"stack_store": 1, "stack_load": 2},
        "loop_bodies": [
            {"innermost": innermost, "per_iteration": {
                "est_alu_cycles": slots, "simd_matrix": matrix}}
            for slots, matrix, innermost in loops
        ],
    }]}]
"""


@pytest.fixture
def aid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs a compiler that always counts the same."""
    (tmp_path / "agxkernel.py").write_text(AID)
    monkeypatch.setenv("AGX_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "agxkernel", raising=False)
    agx._program.cache_clear()
    yield
    agx._program.cache_clear()
    sys.modules.pop("agxkernel", None)


@pytest.mark.usefixtures("aid")
def test_slots_are_those_of_the_installed_compiler() -> None:
    problem = problem_of(8, 64, 256)
    plan = rival_calls.plan_of(problem, DEVICE, kernel="gemm_register")

    found = agx.count(launches(plan)[0])

    assert (found.registers, found.spills, found.code) == (100, 3, 4000)
    assert found.slots == (700, 9)
    assert found.slots_with(32) == 700
