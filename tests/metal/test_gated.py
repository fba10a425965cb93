"""Gate and up in one launch on Metal: half of the simdgroups compute each."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_emulator import emulated, trace
from mlx_marlin.backends import devices, graph, planner, selection
from mlx_marlin.backends.metal import backend as metal
from mlx_marlin.backends.metal.main_loop import loop_of
from mlx_marlin.guard import known_answers
from mlx_marlin.guard.miniatures import instances_of, miniatures
from mlx_marlin.planning.epilogue import PLAIN, Epilogue
from mlx_marlin.planning.plan import Plan
from mlx_marlin.planning.problem import Problem
from mlx_marlin.products import serving
from support import drawn_arrays, epilogues, format_cases, strategies
from support.oracles import exact
from support.profiles import drawn, sampled
from support.trace_mode import emulator_only, needs_kernels

pytestmark = [pytest.mark.metal, needs_kernels]

SILU = Epilogue(activation="silu", gated=True)
DEVICE = devices.named("Apple M4 Max")
THERE = serving.Place(device=DEVICE, is_here=False)
K = 448


def problem_of(m: int, n: int = 192, layout: str = "mlx", **options: object) -> Problem:
    fields = {"m": m, "n": n, "k": K, "layout": layout, "epilogue": SILU, **options}
    return Problem(**fields)


def assert_gated(plan: Plan, seed: int) -> None:
    """Checks a plan on any format against float64, element by element."""
    problem = plan.problem
    x = format_cases.activations(problem.m, problem.k, dtype=problem.dtype, seed=seed)
    weight = drawn_arrays.weight_of(problem, seed=seed)
    arrays = format_cases.arguments(weight, problem.layout)

    y = graph.product(plan)(x, *arrays)

    total = exact(x) @ weight.decoded.T
    expected = epilogues.finished(total, (), problem.epilogue)
    assert (y.shape, y.dtype) == (expected.shape, getattr(mx, problem.dtype))
    sums = epilogues.off_of_sums(exact(x), weight.decoded)
    off = epilogues.off_of_gated(total, sums, problem.epilogue.activation)
    assert epilogues.are_within(y, expected, off)


@st.composite
def gated_plans(draw: st.DrawFn) -> Plan:
    """Draws any plan of a gated product of any format, sensible or not."""
    drawn_problem = draw(
        strategies.problems(
            max_m=40, max_n=80, max_k=512, formats=strategies.ANY_FORMAT
        )
    )
    packed = drawn_problem.layout == "marlin"
    n = 64 * -(-drawn_problem.n // 40) if packed else 2 * drawn_problem.n
    activation = draw(st.sampled_from(["none", "silu", "gelu", "gelu_approx"]))
    epilogue = Epilogue(activation=activation, gated=True)
    problem = replace(drawn_problem, n=n, epilogue=epilogue)
    body = planner.make(problem, device=DEVICE, simdgroups_k=2)
    most = 8 // body.simdgroups_m
    count = 2 * draw(st.integers(1, most // 2))
    return replace(
        body,
        simdgroups_k=count,
        operand=draw(strategies.operands(problem, body.kernel)),
    )


@drawn(3, plan=gated_plans(), seed=st.integers(0, 2**16))
def test_every_plan_gates_its_product(plan: Plan, seed: int) -> None:
    assert_gated(plan, seed)


@sampled(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 11])
def test_halves_meet_whatever_the_rows(m: int, layout: str, dtype: str) -> None:
    problem = problem_of(m, layout=layout, dtype=dtype, scale_dtype=dtype)
    plan = planner.make(problem, device=DEVICE)
    most = {"float16": 5, "bfloat16": 4, "float32": 3}[dtype]  # by a thread's registers
    assert plan.kernel == ("gemv" if m <= most else "gemm_register")

    assert_gated(plan, seed=m)


@sampled(1)
@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("m", [2, 9])
def test_traced_twice_in_any_order_the_bits_are_the_same(m: int, layout: str) -> None:
    plan = planner.make(problem_of(m, layout=layout), device=DEVICE)
    x, native = drawn_arrays.arrays(plan.problem, seed=3)

    first = drawn_arrays.run(plan, x, native, x, x, x)

    for seed in (1, 2):
        with drawn_arrays.another_schedule(seed):
            assert mx.array_equal(
                first, drawn_arrays.run(plan, x, native, x, x, x), equal_nan=True
            )
    if selection.backend() == "emulator":
        with emulated(trace=True):
            assert mx.array_equal(first, drawn_arrays.run(plan, x, native, x, x, x))


@sampled(2)
@emulator_only
@pytest.mark.parametrize("m", [1, 2, 8])
def test_a_launch_reads_each_weight_once(m: int) -> None:
    plan = planner.make(problem_of(m, 256, "marlin", k=512), device=DEVICE)
    weight = drawn_arrays.weight_of(plan.problem, seed=0)
    x = format_cases.activations(m, 512, dtype="float16", seed=1)
    arrays = format_cases.arguments(weight, "marlin")

    found = trace(lambda: mx.eval(graph.product(plan)(x, *arrays)))

    assert len(found) == 1
    words = found[0].of("w")
    assert words.read_bytes == 256 * 512 // 2
    assert words.repeated_read_bytes == 0
    assert found[0].of("out").written_bytes == m * 128 * 2


def test_a_number_that_is_none_stays_in_its_row_and_column() -> None:
    plan = planner.make(problem_of(3), device=DEVICE)
    x, native = drawn_arrays.arrays(plan.problem, seed=4)
    whole = drawn_arrays.run(plan, x, native, x, x, x)
    scales = np.array(native[1])
    scales[96 + 5, 2] = np.nan  # of up
    x_values = np.array(x)
    x_values[1, 7] = np.nan

    y = drawn_arrays.run(plan, mx.array(x_values), native, x, x, x)
    of_scale = drawn_arrays.run(
        plan, x, (native[0], mx.array(scales), native[2]), x, x, x
    )

    assert mx.all(mx.isnan(y[1])).item()
    assert mx.array_equal(y[::2], whole[::2])
    assert mx.all(mx.isnan(of_scale[:, 5])).item()
    assert mx.array_equal(of_scale[:, 6:], whole[:, 6:])


def test_a_large_gate_overflows_nothing_on_the_way() -> None:
    """Silu of -1e4 is 0 and of 1e4 is 1e4, although its exponential overflows."""
    problem = problem_of(1, 4, dtype="float32", scale_dtype="float32", k=64)
    words, scales = mx.zeros((4, 8), mx.uint32), mx.zeros((4, 1))
    biases = mx.array([[1e4], [-1e4], [2.0], [3.0]])
    x = mx.concatenate([mx.ones((1, 1)), mx.zeros((1, 63))], axis=1)

    y = drawn_arrays.run(planner.make(problem), x, (words, scales, biases), x, x, x)

    np.testing.assert_array_equal(np.array(y), [[2e4, 0.0]])


@pytest.mark.parametrize("layout", ["mlx", "marlin"])
@pytest.mark.parametrize("m", [1, 8, 40])
def test_the_guard_checks_the_same_instance(m: int, layout: str) -> None:
    large = problem_of(m, 24576, layout, k=4096)
    plan = planner.make(large, device=DEVICE)

    for small in miniatures(plan):
        assert small.problem.bytes < 2**20
        assert instances_of(small) == instances_of(plan)
        assert small.problem.epilogue.gated
    if m == 8:
        assert known_answers.fault_of(plan) is None
    ragged = planner.make(problem_of(8, 2 * 1001, k=512), device=DEVICE)
    assert [small.problem.columns for small in miniatures(ragged)] == [51]


@given(
    m=st.integers(1, 130),
    pairs=st.integers(1, 40),
    groups=st.integers(1, 40),
    layout=st.sampled_from(["mlx", "marlin"]),
)
def test_plans_have_both_halves_in_a_threadgroup(
    m: int, pairs: int, groups: int, layout: str
) -> None:
    n = 64 * pairs if layout == "marlin" else 2 * pairs
    plan = planner.choose(problem_of(m, n, layout, k=64 * groups), DEVICE)

    assert (plan.simdgroups_n, plan.simdgroups_k % 2) == (2, 0)
    assert (plan.tile.n, plan.reduction, plan.dispatches) == (64, "none", 1)
    assert plan.work.tiles == plan.m_tiles * -(-n // 64)
    assert str(plan.tile) in plan.explain()


def test_the_model_counts_the_loop_of_a_plain_product() -> None:
    gated = problem_of(1, 8192, "marlin", k=4096)
    plain = replace(gated, epilogue=PLAIN)
    both = [loop_of(each, 0, False, DEVICE) for each in (gated, plain)]

    assert both[0].slots == both[1].slots


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layout": "marlin", "n": 160}, "n / 2 = 80 is no multiple of 32"),
        ({"invariant": True}, "invariant"),
    ],
)
def test_what_kernels_do_not_gate_is_stated(
    options: dict[str, object], text: str
) -> None:
    problem = problem_of(2, **options)
    assert text in str(serving.serve_problem(problem, THERE))


@pytest.mark.parametrize("strategy", ["stream_k", "split_k", "hytis", "stripe"])
def test_tiles_are_not_split(strategy: str) -> None:
    with pytest.raises(ValueError, match="needs gemv or gemm_register"):
        planner.make(problem_of(2, 512), device=DEVICE, strategy=strategy)


def test_no_other_kernel_gates() -> None:
    with pytest.raises(ValueError, match="gated=True needs gemv or gemm_register"):
        planner.make(problem_of(16), device=DEVICE, kernel="gemm_staged")


@pytest.mark.parametrize("overrides", [{"simdgroups_n": 1}, {"simdgroups_k": 3}])
def test_a_gate_halves_the_simdgroups(overrides: dict[str, int]) -> None:
    plan = planner.make(problem_of(1), device=DEVICE, simdgroups_k=4)
    with pytest.raises(ValueError, match=r"simdgroups_n=.*expected 2 and an even"):
        replace(plan, **overrides)


def test_gate_and_up_stay_apart_where_that_is_predicted_to_be_faster() -> None:
    """Three tiles of 16 rows keep 3 of 40 cores busy; splits of k keep all."""
    problem = problem_of(16, 192, "marlin", k=16384)

    reason = str(metal.handover(problem, DEVICE))

    assert "as separate operations" in reason
    assert metal.handover(problem_of(1, 24576, "marlin", k=4096), DEVICE) is None


def test_one_row_in_the_layout_of_mlx_stays_with_stock() -> None:
    reason = str(metal.handover(problem_of(1, 24576, k=4096), DEVICE))
    assert "by the table of Apple M4 Max" in reason
