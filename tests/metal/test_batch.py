"""Several products of one shape, each with a weight of its own, in one line of work."""

from collections import Counter
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_emulator import emulated, trace
from mlx_marlin import state
from mlx_marlin.backends import launcher, planner, selection
from mlx_marlin.backends.metal import explicit
from mlx_marlin.backends.metal.choice import candidates
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.backends.metal.stock.prediction import stock_call, stock_prediction
from mlx_marlin.backends.planner import predict
from mlx_marlin.planning.dequantize_plan import DequantizePlan
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import MOST_ELEMENTS, Problem
from mlx_marlin.planning.work.decompositions import data_parallel
from mlx_marlin.planning.work.division import STRATEGIES
from mlx_marlin.planning.work.tiles import Reduction
from mlx_marlin.planning.work.work import Work
from mlx_marlin.weights.formats import CHANNEL, FORMATS
from support import drawn_arrays, epilogues, format_cases, launches, oracles, strategies
from support.drawn_arrays import run
from support.parts_of_plans import corner, product_of
from support.profiles import drawn, sampled
from support.trace_mode import emulator_only, needs_kernels

needs_kernels = needs_kernels

RAGGED = {
    "gemv": Problem(m=2, n=70, k=448, batch=3),
    "gemm_register": Problem(m=11, n=70, k=448, batch=3),
    "packed groups of 128": Problem(
        m=3, n=40, k=7 * 128, group_size=128, layout="marlin", batch=4
    ),
    "packed groups of 32, half a trip": Problem(
        m=13, n=70, k=11 * 32, group_size=32, layout="marlin", batch=2
    ),
}
"""Problems that no strategy divides evenly: ranges cross from product to product."""
REDUCTIONS: tuple[Reduction, ...] = ("workspace", "atomic")
OF_ONE_TILE_SIZE = {*STRATEGIES} - {"hytis"}


def in_float32(problem: Problem) -> Problem:
    return replace(problem, dtype="float32", scale_dtype="float32")


def plans(**options: Any) -> st.SearchStrategy[Plan]:
    return strategies.runnable_plans(batches=strategies.BATCHES, **options)


@needs_kernels
@drawn(4, 20, plan=plans(), seed=st.integers(0, 99))
def test_every_plan_computes_every_product(plan: Plan, seed: int) -> None:
    problem = plan.problem
    x, native = drawn_arrays.arrays(problem, seed=seed)

    y = run(plan, x, native)

    assert y.shape == (problem.batch, problem.m, problem.n)
    oracles.assert_close(
        y,
        mx.quantized_matmul(x, *native, group_size=problem.group_size, bits=4),
        x,
        native,
        group_size=problem.group_size,
        offset=format_cases.offset_of(plan.problem.format, plan.operand),
    )


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
@drawn(3, 15, both=_one_by_one())
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

    y = launcher.product(together)(
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
        expected = launcher.product(alone)(x[i], *arguments, *own)
        assert mx.array_equal(y[i], expected, equal_nan=True)


@sampled(2)
@needs_kernels
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("problem", RAGGED.values(), ids=RAGGED)
def test_all_strategies_give_the_same_integers(
    problem: Problem, reduction: Reduction
) -> None:
    problem = in_float32(problem)
    made = strategies.one_of_each(problem, reduction=reduction)
    assert {plan.strategy for plan in made} == OF_ONE_TILE_SIZE
    assert any(crosses(plan) for plan in made)
    draw = np.random.default_rng(problem.n)
    size = problem.batch, problem.m, problem.k
    x = mx.array(draw.integers(-8, 9, size).astype(np.float32))
    _, (w, *_) = drawn_arrays.arrays(problem, seed=1)
    size = problem.batch, problem.n, problem.groups
    scales = mx.array(draw.integers(-4, 5, size), mx.float32)
    biases = mx.array(draw.integers(-8, 9, size), mx.float32)
    expected = oracles.product(x, w, scales, biases, group_size=problem.group_size)

    for plan in made:
        y = run(plan, x, (w, scales, biases))

        np.testing.assert_array_equal(np.array(y), expected)


def crosses(plan: Plan) -> bool:
    """Whether a threadgroup has k tiles of one product and of the next."""
    groups = range(plan.num_threadgroups)
    products = ({product_of(plan, s.tile) for s in plan.work.splits(g)} for g in groups)
    return any(len(each) > 1 for each in products)


@sampled(1)
@emulator_only
@pytest.mark.parametrize("problem", RAGGED.values(), ids=RAGGED)
def test_no_strategy_races_or_strays(problem: Problem) -> None:
    x, native = drawn_arrays.arrays(problem, seed=2)
    for plan in strategies.one_of_each(problem):
        with emulated(trace=True):
            run(plan, x, native)


@needs_kernels
@drawn(3, 15, plan=plans(atomic=False), offsets=st.tuples(*[st.integers(0, 9)] * 4))
def test_arrays_may_start_anywhere_in_their_buffers(
    plan: Plan, offsets: tuple[int, ...]
) -> None:
    x, native = drawn_arrays.arrays(plan.problem, seed=0)
    arrays = (x, *drawn_arrays.stored(plan.problem, native))
    views = [
        drawn_arrays.shifted(each, offset)
        for offset, each in zip(offsets, arrays, strict=True)
    ]
    mx.eval(views)

    y = launcher.product(plan)(*views)

    assert mx.array_equal(y, run(plan, x, native))


@needs_kernels
@drawn(
    3,
    15,
    plan=plans(dtypes=st.just("float32"), epilogues=strategies.EPILOGUES, max_k=192),
)
def test_an_epilogue_finishes_every_product(plan: Plan) -> None:
    problem = plan.problem
    x, native = drawn_arrays.arrays(problem, seed=1)
    finish = drawn_arrays.finish_arrays(problem, seed=2)
    given_arrays = finish if problem.epilogue.explain() else ()

    y = launcher.product(plan)(x, *drawn_arrays.stored(problem, native), *given_arrays)

    total = oracles.product(x, *native, group_size=problem.group_size)
    expected = epilogues.finished(total, finish, problem.epilogue)
    off = np.abs(oracles.exact(y) - expected)
    assert np.all(off <= epilogues.allowed(plan, x, native, finish))


@needs_kernels
@pytest.mark.parametrize("problem", RAGGED.values(), ids=RAGGED)
def test_a_reduce_reads_the_slots_that_were_written_and_no_other(
    problem: Problem,
) -> None:
    for plan in strategies.one_of_each(in_float32(problem)):
        if not plan.is_split:
            continue
        partials = np.full(plan.workspace_shape, np.nan, np.float32)
        expected = np.zeros(plan.workspace_shape[1:], np.float32)
        draw = np.random.default_rng(5)
        for threadgroup in range(plan.num_threadgroups):
            for split in plan.work.splits(threadgroup):
                row, col = corner(plan, split.tile)
                first = product_of(plan, split.tile) * problem.m
                rows = slice(first + row, first + min(row + plan.tile.m, problem.m))
                part = rows, slice(col, col + plan.tile.n)
                values = draw.integers(-9, 10, expected[part].shape)
                partials[(split.slot, *part)] = values
                expected[part] += values

        y = launches.reduction(plan)(mx.array(partials))

        np.testing.assert_array_equal(
            np.array(y), expected.reshape(problem.result_shape)
        )


@given(plan=plans())
@settings(max_examples=200)
def test_every_k_tile_of_every_product_is_visited_once(plan: Plan) -> None:
    problem = plan.problem
    seen: Counter[tuple[int, int, int, int]] = Counter()
    for threadgroup in range(plan.num_threadgroups):
        for split in plan.work.splits(threadgroup):
            place = product_of(plan, split.tile), *corner(plan, split.tile)
            ks = range(split.k_idx, split.k_idx + split.k_tile_count)
            seen.update((*place, k) for k in ks)

    expected = {
        (product, row, col, k)
        for product in range(problem.batch)
        for row in range(0, problem.m, plan.tile.m)
        for col in range(0, problem.n, plan.tile.n)
        for k in range(plan.k_tiles)
    }
    assert seen == dict.fromkeys(expected, 1)


@given(
    plan=strategies.plans(
        of=strategies.problems(
            formats=strategies.ANY_FORMAT, batches=strategies.BATCHES
        )
    )
)
@settings(max_examples=30)
def test_mlx_records_two_dispatches_for_all_products(plan: Plan) -> None:
    problem = plan.problem
    calls: list[dict[str, Any]] = []
    dtype, scale_dtype = getattr(mx, problem.dtype), getattr(mx, problem.scale_dtype)
    blanks = (
        mx.zeros((problem.batch, problem.m, problem.k), dtype),
        mx.zeros(problem.code_bytes // 4, mx.uint32),
        *[mx.zeros((problem.batch, problem.n, problem.groups), scale_dtype)] * 2,
    )

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(selection.ENVIRONMENT, "metal")
        state.reset()
        mx.export_function(calls.append, launcher.product(plan), *blanks)
    state.reset()

    nodes = [each for each in calls if each.get("name") == "CustomKernel"]
    assert len(nodes) == 1 + plan.needs_second_pass
    outputs = [node["outputs"][0][1:] for node in nodes]
    assert outputs[-1] == ((problem.batch, problem.m, problem.n), dtype)
    assert nodes[0]["arguments"][2] == plan.num_threadgroups * plan.threads
    if plan.reduction == "workspace":
        rows = problem.batch * problem.m
        slots = plan.work.slots
        assert outputs[0] == ((slots, rows, problem.n), mx.float32)
    if plan.needs_second_pass:
        threads = problem.batch * -(-problem.m // 4) * problem.n
        assert nodes[1]["arguments"][2] == threads


@sampled(2)
@emulator_only
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("m", [3, 8, 16])
def test_each_weight_is_read_once(m: int, layout: str) -> None:
    problem = Problem(m=m, n=64, k=256, batch=3, layout=layout)
    plan = planner.make(problem, strategy="data_parallel")
    x, native = drawn_arrays.arrays(problem, seed=0)
    arguments = drawn_arrays.stored(problem, native)

    counters = trace(launcher.product(plan), x, *arguments)

    read = counters[0].of("w")
    assert read.read_bytes == problem.code_bytes == 3 * 64 * 256 // 2
    assert read.repeated_read_bytes == 0


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_has_at_least_one_product(batch: int) -> None:
    with pytest.raises(ValueError, match=f"batch={batch} must be at least 1"):
        Problem(m=1, n=32, k=64, batch=batch)


@pytest.mark.parametrize(("m", "n"), [(64, 1), (1, 64), (1, 1)])
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
def test_arrays_that_32_bits_cannot_count_are_refused(
    m: int, n: int, layout: str
) -> None:
    batch = MOST_ELEMENTS // 4096 + 1 if m * n > 1 else MOST_ELEMENTS // 32
    k = 4096 * 8 if n > 1 else 64

    with pytest.raises(ValueError, match=f"batch={batch} make an array"):
        Problem(m=m, n=n, k=k, batch=batch, layout=layout)


@pytest.mark.parametrize("batch", [1, 4])
def test_bytes_that_32_bits_cannot_count_are_refused(batch: int) -> None:
    # 4 GiB of codes, of which each byte is an offset: words are a quarter of them.
    whole = Problem(m=1, n=2**19 // batch, k=2**13, group_size=32, bits=6, batch=batch)
    assert whole.code_bytes // 4 < MOST_ELEMENTS

    with pytest.raises(ValueError, match="make an array of"):
        replace(whole, n=3 * 2**19 // batch, bits=3)


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
        assert [*explicit.plans(problem, device, {"strategy": strategy})]
    compared = [each.plan.strategy for each in candidates(problem, device, {})]
    assert compared
    assert "hytis" not in compared


def test_a_batch_moves_and_computes_as_much_as_its_products() -> None:
    one = Problem(m=3, n=96, k=256)
    four = replace(one, batch=4)

    assert (four.bytes, four.flops) == (4 * one.bytes, 4 * one.flops)
    assert "each of 4 weights" in four.explain()
    assert "weights" not in one.explain()
    device = Device.named("Apple M3 Max")
    for m in (3, 40):
        rows = replace(four, m=m)
        alone, call = stock_call(replace(one, m=m), device), stock_call(rows, device)
        assert call.split_k == 1
        assert call.threadgroups == 4 * alone.threadgroups // alone.split_k
        # No times of batches were published.
        assert not stock_prediction(rows, device).calibrated


def test_many_small_products_fill_what_one_splits_for() -> None:
    device = Device.named("Apple M3 Max")
    one = Problem(m=8, n=128, k=2048, invariant=True)

    alone = planner.choose(one, device)
    together = planner.choose(replace(one, batch=128), device)

    assert alone.is_split
    assert not together.is_split
