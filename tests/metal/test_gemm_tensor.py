"""`gemm_tensor` against float64, in trace mode where the emulator runs it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_marlin.backends import planner, selection
from mlx_marlin.backends.devices import current, named
from mlx_marlin.planning.epilogue import Epilogue
from mlx_marlin.planning.explicit import PlanOverrides
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem, problem_of
from mlx_marlin.weights.formats import LAYOUTS
from support import drawn_arrays, format_cases, oracles, strategies
from support.drawn_arrays import another_schedule
from support.finished_products import EVERYTHING, assert_finished
from support.format_cases import Variant
from support.format_oracle import assert_close
from support.profiles import sampled
from support.trace_mode import emulator_only

pytestmark = pytest.mark.skipif(
    selection.backend() == "stock"
    or (selection.backend() == "metal" and not current().has_tensor_units),
    reason="nothing here runs tensor operations",
)
M5_MAX = named("Apple M5 Max")
ROWS = (1, 5, 8, 9, 16, 17, 24, 31, 32, 33, 40, 64, 70)
DTYPES = ("float16", "bfloat16")


def tensor_plan(problem: Problem, **overrides: object) -> Plan:
    given: PlanOverrides = {"kernel": "gemm_tensor", **overrides}  # type: ignore[typeddict-item]
    return planner.make(problem, device=M5_MAX, **given)


def variants() -> Iterator[tuple[Variant, int, str]]:
    """Every format, with rows and dtypes in turn."""
    rows, dtypes = cycle(ROWS), cycle(DTYPES)
    for variant in format_cases.VARIANTS:
        given = variant.mode, variant.group_size, variant.dtype
        if variant.fragments and format_cases.has_tensor_products(*given):
            yield variant, next(rows), variant.dtype
    for mode, bits, group in format_cases.GROUPED:
        if not format_cases.has_tensor_products(mode, group, "float16"):
            continue
        for layout in format_cases.layouts_of(mode, bits, group):
            dtype = next(dtypes)
            known = format_cases.FORMATS[mode, bits].scale_dtype(dtype)
            added = Variant(
                mode, bits, group, layout, dtype, known, 2, False, bits % 2 == 0
            )
            yield added, next(rows), dtype


@sampled(1, 10)
@pytest.mark.parametrize(("variant", "m", "dtype"), [*variants()], ids=str)
def test_every_format_is_as_exact_as_promised_and_has_the_same_bits_twice(
    variant: Variant, m: int, dtype: str
) -> None:
    n, k = 75, 5 * variant.step
    problem = variant.problem(m, n, k)
    overrides: dict[str, object] = {"strategy": "data_parallel"}
    if variant.split:
        overrides = {"strategy": "stream_k", "num_threadgroups": 7, "minimum": 1}
    plan = tensor_plan(problem, **overrides)
    weight = variant.weight(n, k, seed=3)
    x = format_cases.activations(m, k, dtype=dtype, seed=4)

    # Variants that cover every pair of values are traced; others compile faster.
    trace = variant in format_cases.VARIANTS
    with another_schedule(1, trace=trace):
        y = format_cases.run(plan, x, weight)
    with another_schedule(2, trace=trace):
        again = format_cases.run(plan, x, weight)

    assert_close(y, x, weight, operand=plan.operand, dtype=dtype)
    assert mx.array_equal(y, again)


PROBLEMS = strategies.problems(
    max_m=70,
    max_n=100,
    max_k=512,
    formats=strategies.ANY_FORMAT,
    dtypes=st.sampled_from(DTYPES),
).filter(
    lambda problem: format_cases.has_tensor_products(
        problem.mode, problem.group_size, problem.dtype
    )
)


@pytest.mark.slow
@settings(max_examples=40)
@given(problem=PROBLEMS, seed=st.integers(0, 2**16), data=st.data())
def test_ragged_products_are_as_exact_as_promised(
    problem: Problem, seed: int, data: st.DataObject
) -> None:
    plan = tensor_plan(problem)
    along_k = data.draw(st.integers(1, 8 // plan.simdgroup_grid[0]))
    plan = replace(plan, simdgroups_k=along_k)
    weight = drawn_arrays.weight_of(problem, seed=seed)
    x = format_cases.activations(problem.m, problem.k, dtype=problem.dtype, seed=seed)

    y = format_cases.run(plan, x, weight)

    assert_close(y, x, weight, operand=plan.operand, dtype=problem.dtype)


@pytest.mark.slow
@sampled(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [19, 50])
def test_all_strategies_give_the_same_integers(m: int, layout: str, dtype: str) -> None:
    problem = Problem(
        m=m, n=150, k=11 * 64, dtype=dtype, scale_dtype=dtype, layout=layout
    )
    x, native, expected = drawn_arrays.integer_arrays(problem)
    divisions: tuple[dict[str, object], ...] = (
        {"strategy": "data_parallel"},
        {"strategy": "stripe", "num_threadgroups": 3},
        {"strategy": "split_k", "k_parallel": 3},
        {"strategy": "split_k", "k_parallel": 3, "reduction": "atomic"},
        {"strategy": "stream_k", "num_threadgroups": 7, "minimum": 1},
        {"strategy": "hybrid", "num_threadgroups": 7, "whole": 2, "minimum": 1},
    )

    for overrides in divisions:
        with another_schedule(3, trace=True):
            y = drawn_arrays.run(tensor_plan(problem, **overrides), x, native)

        rounded = mx.array(expected.astype(np.float32)).astype(y.dtype)
        np.testing.assert_array_equal(oracles.exact(y), oracles.exact(rounded))


@sampled(1)
@pytest.mark.parametrize("reduction", ["none", "workspace"])
@pytest.mark.parametrize("m", [7, 24, 37])
def test_an_epilogue_finishes_the_product(m: int, reduction: str) -> None:
    problem = Problem(m=m, n=70, k=448, epilogue=EVERYTHING)
    split = {"strategy": "split_k", "k_parallel": 3}
    whole = {"strategy": "data_parallel"}

    assert_finished(
        tensor_plan(problem, **(whole if reduction == "none" else split)), seed=1
    )


def test_results_in_parts_are_those_of_the_whole() -> None:
    problem = Problem(m=21, n=86, k=320)
    x, native = drawn_arrays.arrays(problem, seed=2)
    whole = drawn_arrays.run(tensor_plan(problem), x, native)
    fused = replace(problem, epilogue=Epilogue(parts=(64, 22)))

    unused = drawn_arrays.finish_arrays(problem, seed=2)
    parts = drawn_arrays.run(tensor_plan(fused), x, native, *unused)

    assert mx.array_equal(mx.concatenate([*parts], axis=-1), whole)


@sampled(1)
@pytest.mark.parametrize("k_parallel", [2, 1])
def test_a_batch_is_as_many_products(k_parallel: int) -> None:
    problem = Problem(m=18, n=70, k=192, batch=3)
    x, native = drawn_arrays.arrays(problem, seed=5)
    plan = tensor_plan(problem, strategy="split_k", k_parallel=k_parallel)

    y = drawn_arrays.run(plan, x, native)

    for found, one in zip(y, oracles.product(x, *native, group_size=64), strict=True):
        assert oracles.error(found, one) < oracles.TOLERANCES["float16"]


def test_rows_do_not_depend_on_other_rows() -> None:
    problem = Problem(m=40, n=70, k=640)
    weight = drawn_arrays.weight_of(problem, seed=6)
    x = format_cases.activations(40, problem.k, dtype="float16", seed=7)
    fixed = {"strategy": "data_parallel", "simdgroups_k": 2}
    of_all = format_cases.run(tensor_plan(problem, **fixed), x, weight)

    for m in (1, 9, 16, 23, 39):
        plan = tensor_plan(replace(problem, m=m), **fixed)
        assert mx.array_equal(format_cases.run(plan, x[:m], weight), of_all[:m])
    x[5, 77] = mx.nan
    after = format_cases.run(tensor_plan(problem, **fixed), x, weight)
    assert mx.isnan(after[5]).all()
    assert mx.array_equal(after[:5], of_all[:5])
    assert mx.array_equal(after[6:], of_all[6:])


@sampled(1, 3)
@pytest.mark.parametrize("m", [17, 24, 31, 32, 33])
@pytest.mark.parametrize(
    ("mode", "bits", "group_size", "layout", "dtype"),
    [
        ("affine", 4, 64, "mlx", "float16"),
        ("affine", 4, 64, "mlx", "bfloat16"),
        ("affine", 8, 128, "marlin", "bfloat16"),
        ("affine", 3, 32, "mlx", "float16"),
        ("mxfp4", 4, 32, "marlin", "bfloat16"),
        ("nvfp4", 4, 16, "mlx", "float16"),
    ],
)
def test_two_operations_a_simdgroup_give_the_bits_of_one(
    mode: str, bits: int, group_size: int, layout: str, dtype: str, m: int
) -> None:
    """Rows of x that share decoded weights are added up as they are alone."""
    problem = problem_of(
        *(m, 75, 640),
        mode=mode,
        bits=bits,
        group_size=group_size,
        layout=layout,
        dtype=dtype,
    )
    weight = drawn_arrays.weight_of(problem, seed=12)
    x = format_cases.activations(m, problem.k, dtype=dtype, seed=13)
    fixed = {"strategy": "data_parallel", "simdgroups_k": 2}
    plans = [tensor_plan(problem, fragments_m=count, **fixed) for count in (2, 4)]

    one, two = (format_cases.run(plan, x, weight) for plan in plans)

    assert mx.array_equal(one, two)
    assert_close(two, x, weight, operand=plans[1].operand, dtype=dtype)


@sampled(2)
@pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504), ("bfloat16", 1e36)])
@pytest.mark.parametrize("bits", [4, 8])
def test_activations_of_any_size_are_kept_as_they_are(
    dtype: str, largest: float, bits: int
) -> None:
    """No row is scaled to half: small values beside large ones are not lost.

    The weights of the first 20 columns are 0 in the first group, which has the large
    values; all weights are below 1, so that no result overflows.
    """
    problem = Problem(
        m=6, n=40, k=256, bits=bits, dtype=dtype, scale_dtype=dtype, layout="marlin"
    )
    weight = drawn_arrays.weight_of(problem, seed=8)
    words, scales, biases = weight.native
    scales[:20, 0] = biases[:20, 0] = 0
    weight = replace(weight, native=(words, scales, biases))
    assert np.abs(weight.decoded).max() < 0.75
    x = format_cases.activations(6, 256, dtype=dtype, seed=9)
    x[1, 3] = largest
    x[2, ::2] = 1e-6
    x[3] *= 1e-6
    x[4, :64] = 0
    x[4, 5] = -largest

    plan = tensor_plan(problem)
    y = format_cases.run(plan, x, weight)

    assert mx.isfinite(y).all()
    assert_close(y, x, weight, operand=plan.operand, dtype=dtype)


@sampled(2)
@emulator_only
@pytest.mark.parametrize(
    ("m", "fragments_m", "along_m", "along_k"),
    [(7, 2, 1, 8), (24, 2, 2, 4), (64, 2, 4, 2), (7, 4, 1, 8), (24, 4, 1, 8)],
)
def test_operations_memory_and_traffic_are_those_of_the_plan(
    m: int, fragments_m: int, along_m: int, along_k: int
) -> None:
    from metal_emulator import trace

    problem = Problem(m=m, n=128, k=1024, layout="marlin")
    fixed = {"strategy": "data_parallel", "fragments_m": fragments_m}
    plan = tensor_plan(problem, **fixed)
    assert plan.simdgroup_grid == (along_m, 1, along_k)
    weight = drawn_arrays.weight_of(problem, seed=0)
    x = format_cases.activations(m, problem.k, dtype="float16", seed=1)

    found = trace(lambda: format_cases.run(plan, x, weight))[0]

    operations = -(-m // 16)
    assert found.count("tensor") == operations * 4 * problem.k // 32
    # Both operations of a simdgroup have the same words.
    readers = -(-m // (8 * fragments_m))
    assert found.of("w").read_bytes == readers * problem.code_bytes
    # Rounds of partial sums in which some simdgroup has rows.
    rounds = min(-(-m // (8 * along_m)), fragments_m)
    assert found.count("barrier") == 4 * 2 * rounds
    assert found.threadgroup_bytes == plan.threadgroup_bytes <= 8192


@emulator_only
def test_another_layout_of_operands_gives_other_results() -> None:
    """The kernel does not ask for indices: the guard has to check them."""
    import metal_emulator

    problem = Problem(m=16, n=64, k=128)
    weight = drawn_arrays.weight_of(problem, seed=0)
    x = format_cases.activations(16, 128, dtype="float16", seed=1)
    right = format_cases.run(tensor_plan(problem), x, weight)

    with metal_emulator.emulated(tensor_layout="g16"):
        wrong = format_cases.run(tensor_plan(problem), x, weight)

    assert not mx.allclose(right, wrong, rtol=0.1)


@pytest.mark.parametrize(
    ("fields", "overrides", "message"),
    [
        ({"dtype": "float32"}, {}, "round float32"),
        ({"group_size": 16, "layout": "marlin"}, {}, "no half holds"),
        ({}, {"strategy": "hytis"}, "gemm_tensor"),
        ({}, {"fragments_m": 1}, "gemm_tensor"),
        ({}, {"fragments_m": 3}, "gemm_tensor"),
    ],
)
def test_what_has_no_tensor_product_is_refused(
    fields: dict[str, Any], overrides: dict[str, object], message: str
) -> None:
    problem = Problem(**{"m": 8, "n": 640, "k": 64, **fields})
    with pytest.raises(ValueError, match=message):
        tensor_plan(problem, **overrides)
