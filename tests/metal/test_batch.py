"""Several products of one shape, each with a weight of its own, in one line of work."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_emulator import trace
from mlx_marlin.backends import graph, planner
from mlx_marlin.backends.metal import choice
from mlx_marlin.backends.metal.choice import candidates
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.planner import predict
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import MOST_ELEMENTS, Problem
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.work import STRATEGIES, Work
from mlx_marlin.weights.formats import CHANNEL, FORMATS
from support import drawn_arrays, format_cases, strategies
from support.profiles import drawn, sampled
from support.trace_mode import emulator_only, needs_kernels

OF_ONE_TILE_SIZE = {*STRATEGIES} - {"hytis"}


def plans(**options: Any) -> st.SearchStrategy[Plan]:
    return strategies.runnable_plans(batches=strategies.BATCHES, **options)


@st.composite
def _one_by_one(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """Draws a plan that cuts all products alike, and the plan of one of them."""
    plan = draw(
        plans(formats=strategies.ANY_FORMAT, max_k=320, epilogues=strategies.EPILOGUES)
    )
    slices = draw(st.integers(1, min(plan.k_tiles, 3)))
    tiles = plan.m_tiles * plan.n_tiles
    work = Work(
        strategy="split_k",
        tiles=tiles,
        k_tiles=plan.k_tiles,
        threadgroups=tiles * slices,
        slices=slices,
    )
    one = replace(
        plan,
        problem=replace(plan.problem, batch=1),
        work=work,
        reduction="workspace" if work.is_split else "none",
    )
    tiles *= plan.problem.batch
    work = replace(work, tiles=tiles, threadgroups=tiles * slices)
    return replace(one, problem=plan.problem, work=work), one


@needs_kernels
@drawn(2, both=_one_by_one())
def test_a_product_has_the_bits_that_it_has_alone(both: tuple[Plan, Plan]) -> None:
    together, alone = both
    problem = together.problem
    rows = replace(problem, n=problem.batch * problem.n)
    weight = drawn_arrays.weight_of(rows, seed=3).native
    native = [each.reshape(problem.batch, problem.n, -1) for each in weight]
    size = (problem.batch, problem.m, problem.k)
    x = mx.random.normal(size, key=mx.random.key(1)).astype(getattr(mx, problem.dtype))
    finish = drawn_arrays.finish_arrays(problem, seed=4)
    of_rows = () if not together.problem.epilogue.explain() else finish

    y = graph.product(together)(
        x, *drawn_arrays.stored(problem, tuple(native)), *of_rows
    )

    for i in range(problem.batch):
        one = format_cases.Weight(
            problem.mode,
            problem.bits,
            problem.group_size,
            tuple(each[i] for each in native),
        )
        own = [each if each.ndim == 1 else each[i] for each in of_rows]
        arguments = format_cases.arguments(one, problem.layout)
        expected = graph.product(alone)(x[i], *arguments, *own)
        assert mx.array_equal(y[i], expected, equal_nan=True)


@sampled(1)
@emulator_only
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("m", [3, 8, 16])
def test_each_weight_is_read_once(m: int, layout: str) -> None:
    problem = Problem(m=m, n=64, k=256, batch=3, layout=layout)
    plan = planner.make(problem, strategy="data_parallel")
    x, native = drawn_arrays.arrays(problem, seed=0)
    arguments = drawn_arrays.stored(problem, native)

    counters = trace(graph.product(plan), x, *arguments)

    read = counters[0].of("w")
    assert read.read_bytes == problem.code_bytes == 3 * 64 * 256 // 2
    assert read.repeated_read_bytes == 0


def largest(problem: Problem) -> Problem:
    """The problem with as many columns as it may have."""
    least, most = 1, MOST_ELEMENTS
    while most - least > 1:
        middle = (least + most) // 2
        try:
            problem = replace(problem, n=middle)
            least = middle
        except ValueError:
            most = middle
    return replace(problem, n=least)


@given(
    grouped=strategies.ANY_FORMAT,
    packed=st.booleans(),
    batch=st.integers(1, 2**12),
    k=st.integers(1, 2**6),
)
@settings(max_examples=200)
def test_every_offset_that_is_not_refused_fits_32_bits(
    grouped: strategies.Grouped, packed: bool, batch: int, k: int
) -> None:
    mode, bits, group_size = grouped
    known = FORMATS[mode, bits]
    layout = format_cases.layouts_of(mode, bits, group_size)[-1 if packed else 0]
    k *= 256
    group_size = k if group_size == CHANNEL else group_size
    problem = largest(
        Problem(
            m=1,
            n=1,
            k=k,
            batch=batch,
            group_size=group_size,
            bits=bits,
            mode=mode,
            scale_dtype=known.scale_dtypes[0],
            layout=layout,
        )
    )

    rows, unit = batch * problem.n, 4
    if layout == "marlin":
        rows = batch * -(-problem.n // 32) * 32
    else:
        # What a lane loads of a row at a time: 8 codes in groups of 32, else 16.
        size = (8 if group_size == 32 else 16) * bits // 8
        unit = next(each for each in (4, 2, 1) if size % each == 0)
    # The end of an array is no offset of one.
    assert rows * problem.k * bits // 8 // unit <= 2**32
    assert rows * problem.groups * known.parameters <= 2**32


@given(plan=plans(), device=strategies.devices())
@settings(max_examples=100)
def test_so_many_products_are_predicted_to_take_so_many_times_the_work(
    plan: Plan, device: Device
) -> None:
    batch = plan.problem.batch
    work = data_parallel(plan.m_tiles * plan.n_tiles, plan.k_tiles)
    one = replace(
        plan, problem=replace(plan.problem, batch=1), work=work, reduction="none"
    )
    work = data_parallel(batch * work.tiles, work.k_tiles)
    several = replace(one, problem=plan.problem, work=work)

    alone, together = predict(one, device), predict(several, device)

    assert together.memory == pytest.approx(batch * alone.memory)
    assert together.issue == pytest.approx(batch * alone.issue)
    assert together.loads == pytest.approx(batch * alone.loads)


def test_what_takes_one_weight_refuses_several() -> None:
    problem = Problem(m=2, n=256, k=256, batch=2)

    with pytest.raises(ValueError, match="hytis takes one weight, got batch=2"):
        planner.make(problem, strategy="hytis")
    with pytest.raises(ValueError, match="hytis takes one weight, got batch=2"):
        planner.make(problem, simdgroups_n=2)
    wide = planner.make(replace(problem, batch=1), strategy="hytis")
    with pytest.raises(ValueError, match="hytis takes one weight, got batch=2"):
        replace(wide, problem=problem)
    with pytest.raises(ValueError, match="batch=2, expected one weight"):
        DequantizePlan(problem=problem, chunk=32)


@given(problem=strategies.problems(batches=strategies.BATCHES))
@settings(max_examples=50)
def test_there_are_plans_of_every_other_strategy(problem: Problem) -> None:
    device = strategies.KNOWN_DEVICES[0]
    for strategy in OF_ONE_TILE_SIZE:
        if strategy == "hybrid" and problem.n <= 32:
            continue  # of one tile each there may be too few
        assert [*choice.plans_with(problem, device, {"strategy": strategy})]
    compared = [each.plan.strategy for each in candidates(problem, device, {})]
    assert compared
    assert "hytis" not in compared


def test_many_small_products_fill_what_one_splits_for() -> None:
    device = Device.named("Apple M3 Max")
    one = Problem(m=8, n=128, k=2048, invariant=True)

    alone = planner.choose(one, device)
    together = planner.choose(replace(one, batch=128), device)

    assert alone.is_split
    assert not together.is_split
