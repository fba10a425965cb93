"""An invariant product's rows have the same bits, however many rows there are."""

from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.backends import planner
from mlx_marlin.backends.metal.device import Device
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from support import drawn_arrays, oracles, strategies
from support.drawn_arrays import run, stock
from support.finished_products import EVERYTHING
from support.profiles import sampled
from support.trace_mode import needs_kernels

pytestmark = [pytest.mark.metal, needs_kernels]

ROWS = (1, 5, 8, 9, 31, 64)
MOST = 70
SHAPES = ((70, 448, 64), (33, 2048, 128), (150, 11 * 32, 32), (640, 128, 64))
"""n, k and the size of a group."""
CHIPS = ("Apple M1", "Apple M3 Max", "Apple M2 Ultra")


def planned(problem: Problem, chip: Device) -> dict[int, Plan]:
    """Returns the plans of a problem for several numbers of rows."""
    asked = (replace(problem, m=m) for m in (*ROWS, MOST))
    return {each.m: planner.choose(each, chip) for each in asked}


def assert_rows_keep_their_bits(problem: Problem, chip: Device, seed: int) -> None:
    x, native = drawn_arrays.arrays(replace(problem, m=MOST), seed=seed)
    plans = planned(problem, chip)
    of_all = plans.pop(MOST)
    whole = run(of_all, x, native)

    y = stock(of_all, x, native)
    oracles.assert_close(whole, y, x, native, group_size=problem.group_size)
    for m, plan in plans.items():
        assert mx.array_equal(run(plan, x[:m], native), whole[:m]), plan.explain()
    last = plans[ROWS[-1]]
    assert mx.array_equal(run(last, x[-ROWS[-1] :], native), whole[-ROWS[-1] :])


@sampled(1)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    n: int, k: int, group_size: int, dtype: str, layout: str, chip: str
) -> None:
    problem = Problem(
        m=1,
        n=n,
        k=k,
        group_size=group_size,
        dtype=dtype,
        scale_dtype=dtype,
        layout=layout,
        invariant=True,
    )
    assert_rows_keep_their_bits(problem, Device.named(chip), seed=n)


def test_the_shapes_above_are_split_in_every_way_there_is() -> None:
    """So that a bit that depends on the cut would show."""
    found = set()
    for chip in map(Device.named, CHIPS):
        for n, k, size in SHAPES:
            problem = Problem(m=1, n=n, k=k, group_size=size, invariant=True)
            plan = planner.choose(problem, chip)
            found.add((plan.strategy, plan.simdgroups_k > 1))

    assert ("split_k", True) in found
    assert {strategy for strategy, _ in found} == {"split_k", "data_parallel"}


def test_an_epilogue_keeps_them_too() -> None:
    problem = Problem(
        m=MOST,
        n=70,
        k=448,
        invariant=True,
        epilogue=EVERYTHING,
    )
    x, native = drawn_arrays.arrays(problem, seed=1)
    bias, multiplier, residual = drawn_arrays.finish_arrays(problem, seed=2)
    plans = planned(problem, Device.named("Apple M1"))
    whole = run(plans.pop(MOST), x, native, bias, multiplier, residual)

    for m, plan in plans.items():
        y = run(plan, x[:m], native, bias, multiplier[:m], residual[:m])
        assert mx.array_equal(y, whole[:m])


@given(
    problem=strategies.problems(max_m=1, max_n=40_000, max_k=30_000),
    chip=strategies.devices(),
    rows=st.integers(1, 300),
)
def test_the_cut_of_k_does_not_depend_on_the_rows(
    problem: Problem, chip: Device, rows: int
) -> None:
    problem = replace(problem, invariant=True)

    one, several = (planner.choose(replace(problem, m=m), chip) for m in (1, rows))

    assert one.work.slices == several.work.slices
    assert one.simdgroups_k == several.simdgroups_k
    assert one.tile.k == several.tile.k
    assert one.work.k_tiles == several.work.k_tiles
    for plan in (one, several):
        assert plan.kernel == "gemm_register"
        assert plan.operand == "exact"
        assert plan.reduction != "atomic"
        assert plan.strategy in ("data_parallel", "split_k")
