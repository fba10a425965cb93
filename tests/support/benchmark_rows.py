"""Result files of benchmarks with made-up times."""

from dataclasses import replace

from hypothesis import strategies as st

from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.measure.result_file import ResultFile
from mlx_marlin.measure.rows import (
    CLOCKS,
    DEQUANTIZED,
    METHODS,
    OURS,
    STATUSES,
    STOCK,
    STOCK_MODEL,
    FirstTokenRow,
    GenerationRow,
    MachineFacts,
    ProductRow,
    Stage,
    Timing,
)
from mlx_marlin.planning.problem import Problem, problem_of

M3_MAX = Device.named("Apple M3 Max")
FACTS = MachineFacts(
    chip="Apple M3 Max",
    architecture="applegpu_g15s",
    cores=40,
    memory_gb=64,
    system="Darwin 26.1",
    build="25B78",
    backend="metal",
    python="3.12.1",
    mlx="0.32.4",
    mlx_lm="0.32.2",
    mlx_marlin="0.1.0",
    commit="abc1234",
    kernels="0123456789abcdef",
)


def measured(milliseconds: float) -> Timing:
    return Timing(seconds=milliseconds / 1e3, method="wall time", samples=7)


def row(
    problem: Problem, arm: str, milliseconds: float, clock: str = "chain"
) -> ProductRow:
    plan = planner.choose(problem, M3_MAX) if arm == OURS else None
    return ProductRow(
        problem=problem,
        arm=arm,
        clock=clock,
        timing=measured(milliseconds),
        plan=plan,
    )


def mac_file() -> ResultFile:
    """Returns a measured file with rows of every kind."""
    product = problem_of(8, 14336, 4096)
    timing = measured(0.25)
    return ResultFile(
        machine=FACTS,
        date="2026-11-24",
        products=[
            row(of, arm, milliseconds * factor, clock)
            for of, arm, milliseconds in (
                (product, OURS, 0.125),
                (product, STOCK, 0.25),
                (product, DEQUANTIZED, 0.5),
                (replace(product, layout="marlin"), OURS, 0.1),
            )
            for clock, factor in zip(CLOCKS, (1, 0.9), strict=True)
        ],
        generation=[
            GenerationRow(
                model="Qwen3-4B-4bit",
                arm=arm,
                streams=2,
                prompt_tokens=128,
                new_tokens=64,
                prompt=measured(400),
                step=measured(20),
            )
            for arm in (STOCK_MODEL, OURS)
        ],
        first_tokens=[
            FirstTokenRow(
                model="Qwen3-4B-4bit",
                arm=OURS,
                prompt_tokens=128,
                cold=measured(1500),
                warm=timing,
            )
        ],
        stages=[Stage(name="tests", status="failed", host_seconds=2.5, detail="why")],
        notes=["a note"],
    )


numbers = st.floats(1e-4, 1e5)
words = st.text("abcXYZ019 .,-+:()", max_size=30)


@st.composite
def timings(draw: st.DrawFn) -> Timing:
    return Timing(
        seconds=round(draw(numbers), 4) / 1e3,
        method=draw(st.sampled_from([*METHODS])),
        range=round(draw(numbers), 4) / 1e3,
        samples=draw(st.integers(1, 1000)),
        drift=round(draw(st.floats(-0.9, 9)), 4),
    )


@st.composite
def product_rows(draw: st.DrawFn) -> ProductRow:
    mode = draw(st.sampled_from(["affine", "mxfp4", "nvfp4"]))
    problem = problem_of(
        draw(st.integers(1, 600)),
        32 * draw(st.integers(1, 300)),
        64 * draw(st.integers(1, 100)),
        mode=mode,
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        layout=draw(st.sampled_from(["mlx", "marlin"])),
    )
    has_plan = draw(st.booleans())
    return ProductRow(
        problem=problem,
        arm=draw(words),
        clock=draw(st.sampled_from(CLOCKS)),
        timing=draw(timings()),
        plan=planner.choose(problem, M3_MAX) if has_plan else None,
        handover=draw(st.none() | words),
    )


@st.composite
def result_files(draw: st.DrawFn) -> ResultFile:
    stages = st.builds(
        Stage,
        name=words,
        status=st.sampled_from(STATUSES),
        host_seconds=st.integers(0, 600).map(float),
        detail=st.just(""),
    )
    return ResultFile(
        machine=replace(FACTS, chip=draw(words), cores=draw(st.integers(0, 100))),
        date=draw(st.dates()).isoformat(),
        products=draw(st.lists(product_rows(), max_size=3)),
        stages=draw(st.lists(stages, max_size=2)),
    )
